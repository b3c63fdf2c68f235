"""`spark-elastic-run COMMAND`: workers run with the Python that the command names, or that it starts."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.component.local.watched import run_command

SCRIPT = "import os, sys\nprint('rank', os.environ['RANK'], 'runs in', sys.prefix, sys.argv[1:])\n"


def _create_environment(folder: Path, *paths: str) -> str:
    """The Python of a new environment that finds packages in these folders."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (packages / "given.pth").write_text("\n".join(paths))
    return str(folder / "bin" / "python")


def _run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(folder, "-H", "localhost:2", *command)


@pytest.mark.parametrize("given", [("train.py", "--lr", "0.1"), ("-m", "train", "--lr", "0.1")])
def test_workers_run_with_the_python_of_the_command(given: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    other = _create_environment(
        tmp_path / "other", *(path for path in sys.path if path), *site.getsitepackages()
    )
    done = _run(other, *given, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} runs in {tmp_path / 'other'} ['--lr', '0.1']" in done.stdout


def test_a_python_without_the_package_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # An isolated one, which does not look at PYTHONPATH.
    isolated = tmp_path / "isolated-python"
    isolated.write_text(f'#!/bin/sh\nexec {_create_environment(tmp_path / "other")} -I "$@"\n')
    isolated.chmod(0o755)
    done = _run(str(isolated), "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No module named 'spark_elastic'" in done.stderr
    assert "give a Python that has spark_elastic, or install it there" in done.stderr


STARTED = """
import os, sys
import trainer
loaded = "spark_elastic.worker.fork_server" in sys.modules, trainer.loaded_before
print("rank", os.environ["RANK"], os.environ["A"], os.nice(0), sys.flags.optimize, sys.argv[1:], *loaded)
"""


def test_the_pythons_that_a_shell_script_starts_run_on_forked_workers(tmp_path: Path) -> None:
    """What the program imports at its top, and what was asked for, is there before it begins."""
    (tmp_path / "train.py").write_text(STARTED)
    early = "'click.testing' in sys.modules and 'mailbox' in sys.modules"
    (tmp_path / "trainer.py").write_text(f"import sys\nloaded_before = {early}\nimport click.testing\n")
    (tmp_path / "train.sh").write_text("set -e\nA=b exec env nice -n 3 python -O train.py --lr $1\n")
    done = _run("--preload", "mailbox", "bash", "train.sh", "0.1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} b {os.nice(0) + 3} 1 ['--lr', '0.1'] True True" in done.stdout
