from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spark_elastic.data import store
from spark_elastic.data.store import make_scratch_folder, remove_stale_folders
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.devices import GpuClaims

HOLD = """
import sys
from spark_elastic.data.store import make_scratch_folder
with make_scratch_folder() as folder:
    (folder / "model.keras").write_bytes(b"weights")
    sys.stdout.write(f"{folder}\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""


def test_a_host_without_a_temporary_folder_is_told_which_variable_to_set(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "gone"))
    with pytest.raises(InvalidInput, match="set TMPDIR to a folder"), make_scratch_folder():
        pass
    GpuClaims()  # a slot without a GPU needs no such place


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_scratch_folders_of_killed_processes_are_removed(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (place / "spark_elastic-data").mkdir()
        with make_scratch_folder() as mine:
            remove_stale_folders()
            assert theirs.exists()
            process.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not collected yet
            remove_stale_folders()
            assert not theirs.exists()
            assert mine.exists()
    assert [path.name for path in place.iterdir()] == ["spark_elastic-data"]


def test_a_folder_of_an_earlier_process_with_the_same_id_is_removed(place: Path) -> None:
    with make_scratch_folder() as mine:
        boot, started, random = mine.name.rsplit("-", 2)
        earlier = place / f"{boot}-{int(started) - 1}-{random}"
        earlier.mkdir()
        remove_stale_folders()
        assert mine.exists()
        assert not earlier.exists()


def test_scratch_folders_of_other_machines_boots_and_namespaces_stay(place: Path) -> None:
    with make_scratch_folder() as mine:
        name = mine.name.replace(store._build_owner_prefix(), "spark_elastic-01234567-1")
    (place / name.replace(str(os.getpid()), "1")).mkdir()
    remove_stale_folders()
    assert len(list(place.iterdir())) == 1
