"""R12 on real processes: who stands still is borne, whatever was being asked then."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.component.local.watched import start_watched
from tests.scenarios import Fault

HELD = 7.0  # seconds by which the workers' polls, which are held for 8, have been open when processes stop
PAUSE = 10.0
# Longer than the driver's pause and the second by which the last word heard before it may be old, and than a second or
# two of a busy machine besides; shorter than what a poll waits in all.
LONGER = 15.0
SHORTER = 5.0  # than the pause


@pytest.mark.faults
@pytest.mark.parametrize(
    ("whole", "timeout"), [(False, LONGER), (True, SHORTER)], ids=["the driver", "the whole job"]
)
def test_r12_a_pause_ends_no_worker(
    whole: bool, timeout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may stand still for `driver_timeout`; a job for as long as its machine likes (`docker pause`)."""
    monkeypatch.setenv("SPARK_ELASTIC_DRIVER_TIMEOUT", str(timeout))
    with start_watched(tmp_path, Fault(True), "-np", "2", "-H", "localhost:2") as job:
        before = job.await_size(2)
        time.sleep(HELD)
        driver = psutil.Process(job.process.pid)
        paused = [driver, *driver.children(recursive=True)] if whole else [driver]
        for process in paused:
            process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE)
        for process in reversed(paused):
            process.send_signal(signal.SIGCONT)
        taken = job.find_newest()[0]["step"]
        job.wait_for(lambda: job.find_newest()[0]["step"] > taken, "step after the pause")
        time.sleep(2.0)  # whatever follows from it
        assert [line["pid"] for line in job.find_newest()] == [line["pid"] for line in before]
        assert job.stop() == 0
        assert job.sizes() == [2]
