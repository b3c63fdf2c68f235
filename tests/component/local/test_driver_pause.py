"""R12 on real processes: a driver that stands still is borne for `driver_timeout`, whatever was being asked then."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.component.local.watched import start_watched
from tests.scenarios import Fault

HELD = 7.0  # seconds by which the workers' polls, which are held for 8, have been open when the driver stops
PAUSE = 10.0
# Longer than the pause and the second by which the last word heard before it may be old, and than a second or two of a
# busy machine besides; shorter than what a poll waits in all.
TIMEOUT = 15.0


@pytest.mark.faults
def test_r12_a_pause_shorter_than_the_timeout_ends_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_DRIVER_TIMEOUT", str(TIMEOUT))
    with start_watched(tmp_path, Fault(True), "-np", "2", "-H", "localhost:2") as job:
        before = job.await_size(2)
        time.sleep(HELD)
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE)
        job.process.send_signal(signal.SIGCONT)
        time.sleep(2.0)  # whatever follows from it
        assert [line["pid"] for line in job.find_newest()] == [line["pid"] for line in before]
        assert job.stop() == 0
        assert job.sizes() == [2]
