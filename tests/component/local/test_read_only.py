"""Machines on which no folder for temporary files can be written: a job runs all the same, or says which folder it
needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.component.local.watched import LOOP
from tests.sources import PYTHONPATH

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]
ALONE = ("unshare", "--mount")
READ_ONLY = """
set -e
for folder in /tmp /var/tmp /dev/shm; do mount --rbind $folder $folder; mount -o remount,bind,ro $folder; done
mount --bind "$0" "$0"; mount -o remount,bind,rw "$0"
cd /dev/shm
exec "$@"
"""


def run_read_only(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`spark-elastic-run` with two workers, where nothing but the folder can be written."""
    if subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("namespaces of files cannot be made here")
    run = [sys.executable, "-m", "spark_elastic.clusters.cli", "-np", "2", "-H", "localhost:2", *command]
    return subprocess.run(
        [*ALONE, "sh", "-c", READ_ONLY, str(folder), "env", "-u", "TMPDIR", f"PYTHONPATH={PYTHONPATH}", *run],
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_job_needs_no_folder_for_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    done = run_read_only(tmp_path, "python", str(LOOP), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").exists()


def test_a_command_around_python_is_refused_with_the_setting_that_helps(tmp_path: Path) -> None:
    done = run_read_only(tmp_path, "sh", "-c", f"python {LOOP} {tmp_path}")
    assert done.returncode == 1
    assert "Read-only" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert "set TMPDIR to a folder that has room and can be written" in done.stderr
