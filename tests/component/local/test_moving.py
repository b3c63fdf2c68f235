"""The script of docs/moving-from-horovod.md under `spark-elastic-run`: one line changed, and its whole diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.component.local.watched import run_command
from tests.pages import apply_diff, blocks

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]


@pytest.mark.parametrize("form", ["one line", pytest.param("elastic", marks=pytest.mark.faults)])
def test_an_unchanged_script_of_horovod_runs(tmp_path: Path, form: str) -> None:
    _, before = blocks("moving-from-horovod.md", "python")
    one_line, diff = blocks("moving-from-horovod.md", "diff")
    script = tmp_path / "train.py"
    script.write_text(apply_diff(before, one_line if form == "one line" else diff))
    done = run_command(tmp_path, "python", str(script))
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-4]) for line in done.stdout.splitlines() if "on 2 workers" in line]
    assert len(losses) == 8
    assert min(losses[-3:]) < 46  # a third of what the labels vary by
