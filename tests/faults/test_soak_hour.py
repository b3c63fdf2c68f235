"""Two minutes of the soak that `python tests/faults/soak_hour.py` plays for an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_an_hour_of_faults_loses_no_row_and_leaks_nothing(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    command = [
        sys.executable,
        str(Path(__file__).with_name("soak_hour.py")),
        "--minutes",
        "2",
        "--every",
        "10",
    ]
    run = subprocess.run([*command, "--json", str(record)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert sum(json.loads(record.read_text())["kinds"].values()) >= 4
