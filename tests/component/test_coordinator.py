"""A job whose coordinator speaks to its client through a store alone, over real processes of this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.coordinator import CLIENT, COORDINATOR, ChannelEnd, Coordinator, CoordinatorClient
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.gang_scheduler import GangScheduler, JobQueue
from spark_elastic.driver.job import LaunchResult
from spark_elastic.errors import CoordinatorLost
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.testing import CountingProgram, ProcessLauncher
from tests.component.worker.moments import ActListener, HeldProgram

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

KEY = b"k" * 32
SILENT_AFTER = 1.2  # seconds, in place of eight
PROGRAM = f"""
import cloudpickle, sys
from spark_elastic.clusters import coordinator
coordinator.SEND_EVERY, coordinator.SILENT_AFTER, coordinator.POLL_EVERY = 0.1, {SILENT_AFTER}, 0.05
with open(sys.argv[1], "rb") as file:
    coordinator = cloudpickle.load(file)
coordinator.run_driver("127.0.0.1") if sys.argv[2] == "0" else coordinator.wait_standby()
"""


class Task:
    """A coordinator in a process of its own, as it is in a task."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(str(folder))
        self.process: subprocess.Popen[bytes] | None = None
        coordinator = Coordinator(
            ChannelEnd(self.store, "channels/1", KEY, COORDINATOR, CLIENT),
            Limits(2, 1, 2, gather_timeout=60.0),
            ElasticConfig(status_page=False),
            "test",
            encrypted=False,
            check_host=lambda facts: None,
            run=None,
        )
        self.file = folder / "coordinator"
        self.file.write_bytes(cloudpickle.dumps(coordinator))

    def carry(self) -> str:
        self.process = self.attempt(0)
        return f"exit {self.process.wait()}"

    def attempt(self, number: int) -> subprocess.Popen[bytes]:
        """As Spark counts them."""
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(self.file), str(number)])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def follow(self, launcher: ProcessLauncher, listener: JobListener) -> LaunchResult:
        end = ChannelEnd(self.store, "channels/1", KEY, CLIENT, COORDINATOR)
        turn = GangScheduler(JobQueue(), "test", Limits(1, 1, 1), SystemClock())
        spec = SlotSpec(address="", key=KEY, attempt=1, job_name="test")
        client = CoordinatorClient(end, spec, launcher, turn, listener, SystemClock())
        return client.follow(self.carry, ElasticConfig())


def test_a_job_with_a_coordinator_survives_a_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_elastic")
    program = HeldProgram(steps=30, seconds=0.03)
    cluster = ProcessLauncher(program, SystemClock(), room=3)
    watcher = ActListener(10, lambda: cluster.kill(max(cluster.slots())), program.release)
    result = Task(tmp_path).follow(cluster, watcher)
    assert {json.loads(text)["sum"] for text in result.results if text != "null"} == {program.expected_sum()}
    assert [world.size for world in result.worlds] == watcher.sizes
    assert watcher.sizes[0] == 2
    assert len(watcher.sizes) >= 2
    assert result.report.recoveries
    assert any(text.startswith("world 1 is over: ") for text in caplog.messages), "its log, too"
    # What the client sends after the coordinator's end nobody reads: the folder goes with the job.
    left = Store.open(str(tmp_path)).list("channels/1")
    assert len([name for name in left if f"/{CLIENT}-" in name]) == 1, "the client has read everything"


@pytest.mark.faults
def test_a_copy_of_the_coordinators_task_waits_for_the_first_to_end(tmp_path: Path) -> None:
    """Spark takes the result of whichever attempt returns first, and kills the other."""
    program = HeldProgram(steps=5)
    cluster = ProcessLauncher(program, SystemClock(), room=2)
    task = Task(tmp_path)
    copies: list[subprocess.Popen[bytes]] = []
    waited: list[bool] = []

    def speculate() -> None:
        copies.append(task.attempt(1))
        with contextlib.suppress(subprocess.TimeoutExpired):
            copies[0].wait(2.0 + 3 * SILENT_AFTER)
        waited.append(copies[0].poll() is None)
        program.release()

    result = task.follow(cluster, ActListener(2, speculate))
    assert {json.loads(text)["sum"] for text in result.results if text != "null"} == {program.expected_sum()}
    assert waited == [True]
    assert copies[0].wait(30) == 0


@pytest.mark.faults
def test_a_killed_coordinator_is_named_in_the_error(tmp_path: Path) -> None:
    cluster = ProcessLauncher(CountingProgram(steps=2000, seconds=0.02), SystemClock(), room=2)
    task = Task(tmp_path)
    with pytest.raises(CoordinatorLost, match="which ran in a task, was lost: exit -9"):
        task.follow(cluster, ActListener(5, task.kill))
