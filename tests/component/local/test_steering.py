"""Workers drained by hand and hosts listed by a function, on real processes."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.discovery import FixedHosts, JobHandle
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.errors import JobCancelled
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.testing.fakes import CountingProgram
from tests.component.local.watched import start_watched
from tests.component.worker.moments import HeldProgram
from tests.journals import keep_journal
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

CLOCK = SystemClock()


class AtStep(JobListener):
    """A listener that does something at a step, in a thread of its own. then: called in each world but the first."""

    def __init__(self, step: int, act: Callable[[], object], then: Callable[[], None] = lambda: None) -> None:
        self._step = step
        self._act: Callable[[], object] | None = act
        self._then = then
        self._worlds = 0

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        if self._act is not None and metrics["step"] >= self._step:
            act, self._act = self._act, None
            threading.Thread(target=act, name="act").start()

    def on_world(self, size: int, reason: str) -> None:
        self._worlds += 1
        if self._worlds > 1:
            self._then()


def _run(
    program: CountingProgram, launcher: LocalLauncher, listener: AtStep, **settings: Any
) -> LaunchResult:
    discovery = FixedHosts({"a": 1, "b": 1}, CLOCK)
    limits, config = Limits(2, 1, 2, gather_timeout=60.0), ElasticConfig(**settings)
    result = supervise(launcher, discovery, DriverOptions(), limits, config, "test", listener)
    sums = {json.loads(text)["sum"] for text in result.results if text != "null"}
    assert sums == {program.expected_sum()}
    return result


def test_w26_a_drained_worker_costs_no_step_and_its_core_is_free() -> None:
    program, handle = HeldProgram(30, 0.03), JobHandle()
    launcher = LocalLauncher(program, HostSlots({"a": 1, "b": 1}), CLOCK)
    left: list[int] = []

    def drain() -> None:
        handle.drain(rank=1, reason="its core is wanted elsewhere")
        until(lambda: len(launcher.slots()) == 1)
        left.append(len(launcher.slots()))
        program.release()

    with keep_journal(ElasticConfig()) as (config, journal):
        result = _run(program, launcher, AtStep(10, drain), handle=handle, journal=config.journal)
    assert [world.size for world in result.worlds] == [2, 1]
    assert left == [1]
    assert "broke" not in " ".join(journal)
    assert any("its core is wanted elsewhere" in line for line in journal)


def test_hosts_that_a_discovery_function_no_longer_lists_are_drained() -> None:
    program = HeldProgram(30, 0.03)
    launcher = LocalLauncher(program, HostSlots({"a": 1, "b": 1}), CLOCK)
    listed = {"a": 1, "b": 1}
    listener = AtStep(10, lambda: listed.pop("a"), then=program.release)
    result = _run(program, launcher, listener, host_discovery=lambda: dict(listed))
    assert [world.size for world in result.worlds] == [2, 1]


def test_a_job_is_ended_by_its_handle() -> None:
    program, handle = CountingProgram(2000, 0.03), JobHandle()
    launcher = LocalLauncher(program, HostSlots({"a": 1, "b": 1}), CLOCK)
    with pytest.raises(JobCancelled, match="enough is enough"):
        _run(program, launcher, AtStep(3, lambda: handle.cancel("enough is enough")), handle=handle)


@pytest.mark.faults  # tests/component/torch/test_hand_written_resume.py kills the driver of a loop in every build
def test_a_run_id_resumes_after_its_command_was_killed(tmp_path: Path) -> None:
    """`spark-elastic-run --run-id`: killed once a commit is durable, the same command continues after that commit."""
    durable = ("--run-id", "mine", "--store", str(tmp_path / "store"), "--checkpoint-steps", "5")
    fault, folders = Fault(on=True), [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with start_watched(folders[0], fault, "-np", "2", *durable) as job:
        store = Store.open(str(tmp_path / "store"))
        job.wait_for(lambda: bool(CheckpointStore(store, "mine").read_published()), "a durable commit")
        job.process.kill()
        assert job.wait_for_exit() == -signal.SIGKILL
    newest = max(each.position.step for each in CheckpointStore(store, "mine").read_published())
    with start_watched(folders[1], fault, "-np", "1", *durable) as job:
        assert job.await_size(1)
        assert job.stop() == 0
        assert job.lines()[0]["step"] == newest + 1
