"""The whole elastic machinery over plain processes, without a JVM and without a framework.

The program's result is known in closed form, so that every lost, doubled or torn step shows in it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import psutil
import pytest

from elastic_collectives import Group
from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.ports import Post
from spark_elastic.errors import InvalidInput, NotEnoughWorkers, WorkerFailed
from spark_elastic.launch import LaunchResult, Site, supervise
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.protocol.types import Limits, World
from spark_elastic.testing.counting import CountingProgram
from spark_elastic.testing.processes import ProcessLauncher
from spark_elastic.worker.program import Outcome, Session

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

STEPS = 120


class NoDiscovery:
    def start(self, post: Post) -> None:
        """Processes report themselves."""

    def close(self) -> None:
        """Nothing."""


class Watcher:
    """A narrator that strikes once, at a step."""

    def __init__(self, strike: Callable[[], None] | None = None, at: int = 10) -> None:
        self._strike = strike
        self._at = at
        self.lines: list[tuple[int | None, str]] = []

    def log(self, rank: int | None, line: str) -> None:
        self.lines.append((rank, line))

    def progress(self, numbers: Mapping[str, Any]) -> None:
        if self._strike is not None and numbers["step"] >= self._at:
            strike, self._strike = self._strike, None
            # Elsewhere: this is the server's thread, which must go on serving.
            threading.Thread(target=strike, name="strike").start()

    def world(self, size: int, reason: str) -> None:
        """Nothing."""

    def tell(self, text: str) -> None:
        """Nothing."""


def run(launcher: ProcessLauncher, workers: int, watcher: Watcher, **limits: Any) -> LaunchResult:
    bounds = Limits(workers, 1, workers, gather_timeout=60.0, **limits)
    return supervise(launcher, NoDiscovery(), Site(), bounds, ElasticConfig(), "test", watcher)


def launcher(program: CountingProgram, room: int = 3) -> ProcessLauncher:
    return ProcessLauncher(program, SystemClock(), room=room)


def assert_exact(result: LaunchResult, program: CountingProgram) -> None:
    sums = {json.loads(text)["sum"] for text in result.results if text != "null"}
    assert sums == {program.expected()}


def workers(cluster: ProcessLauncher) -> list[psutil.Process]:
    """The active training process of each slot, the oldest child; spares are younger."""
    slots = [psutil.Process(pid) for _, pid in sorted(cluster.slots().items())]
    return [min(slot.children(), key=lambda child: child.create_time()) for slot in slots if slot.children()]


def sizes(result: LaunchResult) -> list[int]:
    return [world.size for world in result.worlds]


def test_results_come_in_rank_order() -> None:
    program = CountingProgram(steps=5)
    result = run(launcher(program), 3, Watcher())
    assert [json.loads(text)["rank"] for text in result.results] == [0, 1, 2]
    assert_exact(result, program)


def test_a_killed_slot_costs_no_step_and_another_takes_its_place() -> None:
    program = CountingProgram(STEPS, 0.03)
    cluster = launcher(program)
    result = run(cluster, 3, Watcher(lambda: cluster.kill(max(cluster.slots()))))
    assert_exact(result, program)
    assert sizes(result)[:2] == [3, 2]


def test_a_killed_child_is_followed_by_its_warm_spare() -> None:
    program = CountingProgram(STEPS, 0.05)
    cluster = launcher(program, room=2)

    def strike() -> None:
        workers(cluster)[0].kill()

    result = run(cluster, 2, Watcher(strike, at=40))
    assert_exact(result, program)
    assert sizes(result)[0] == 2
    assert sizes(result)[-1] == 2
    assert len(sizes(result)) >= 2


def test_a_stopped_child_is_given_up_after_the_lease() -> None:
    program = CountingProgram(STEPS, 0.03)
    cluster = launcher(program)
    stopped: list[psutil.Process] = []

    def strike() -> None:
        stopped.append(workers(cluster)[0])
        stopped[0].send_signal(signal.SIGSTOP)

    result = run(cluster, 3, Watcher(strike), lease=2.0)
    assert_exact(result, program)
    assert any("its process has not run for" in line for line in result.story)
    assert not stopped[0].is_running()


def test_two_die_at_once() -> None:
    program = CountingProgram(STEPS, 0.03)
    cluster = launcher(program)

    def strike() -> None:
        for job in sorted(cluster.slots())[:2]:
            cluster.kill(job)

    result = run(cluster, 3, Watcher(strike))
    assert_exact(result, program)
    assert 1 in sizes(result) or 2 in sizes(result)


def test_all_die_at_once_and_the_job_starts_again() -> None:
    program = CountingProgram(40, 0.03)
    cluster = launcher(program, room=2)

    def strike() -> None:
        for worker in workers(cluster):
            worker.kill()

    result = run(cluster, 2, Watcher(strike))
    assert_exact(result, program)
    assert len(result.worlds) >= 2


class Drainer(NoDiscovery):
    """A discovery that drains a host when told to."""

    def start(self, post: Post) -> None:
        self._post = post

    def drain(self, host: str) -> None:
        self._post(DrainRequested(SystemClock().now(), "the host is wanted elsewhere", host=host))


def test_a_drained_host_leaves_at_a_step_boundary() -> None:
    program = CountingProgram(STEPS, 0.03)
    cluster, drainer = launcher(program), Drainer()
    watcher = Watcher(lambda: drainer.drain(f"host-{max(cluster.slots())}"))
    bounds = Limits(3, 1, 3, gather_timeout=60.0)
    result = supervise(cluster, drainer, Site(), bounds, ElasticConfig(), "test", watcher)
    assert_exact(result, program)
    assert sizes(result)[:2] == [3, 2]
    assert not any("GroupBroke" in line or "broke" in line for line in result.story)


def test_newcomers_join_while_the_others_train() -> None:
    program = CountingProgram(STEPS, 0.05)
    cluster = launcher(program, room=1)
    bounds = Limits(2, 1, 2, gather_timeout=0.5)
    watcher = Watcher(lambda: cluster.add_room(1))
    result = supervise(cluster, NoDiscovery(), Site(), bounds, ElasticConfig(), "test", watcher)
    assert_exact(result, program)
    assert sizes(result) == [1, 2]


class Broken(CountingProgram):
    """Raises at step 3, on every rank."""

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        sys.stderr.write("about to raise\n")
        raise ValueError("the user's own mistake")


def test_r13_an_exception_of_user_code_on_every_worker_ends_the_job_with_its_traceback() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[Broken.__module__])
    watcher = Watcher()
    with pytest.raises(WorkerFailed, match="the user's own mistake") as failed:
        run(launcher(Broken(5), room=2), 2, watcher)
    assert "Traceback" in str(failed.value)
    assert "about to raise" in {line for _, line in watcher.lines}


class BrokenOnce(CountingProgram):
    """Rank 1 of the first world raises; whoever comes after it does not."""

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        if world.fence.generation == 1 and group.rank == 1:
            raise ValueError("one worker's bad moment")
        return super().run(world, group, session)


def test_an_exception_on_one_worker_is_borne() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[BrokenOnce.__module__])
    program = BrokenOnce(40, 0.03)
    result = run(launcher(program, room=2), 2, Watcher())
    assert_exact(result, program)
    assert any("one worker's bad moment" in line for line in result.story)
    assert len(result.worlds) >= 2


class Mumbler(Watcher):
    """A narrator that fails at everything."""

    def progress(self, numbers: Mapping[str, Any]) -> None:
        raise OSError("the terminal is gone")

    def world(self, size: int, reason: str) -> None:
        raise OSError("the terminal is gone")

    def tell(self, text: str) -> None:
        """Nothing."""


def test_a_narrator_that_fails_harms_no_job(caplog: pytest.LogCaptureFixture) -> None:
    program = CountingProgram(20, 0.03)
    assert_exact(run(launcher(program, room=2), 2, Mumbler()), program)
    assert "the narrator failed" in caplog.text


def test_a_taken_driver_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ElasticConfig(driver_port=port)
        cluster = launcher(CountingProgram(1))
        with pytest.raises(InvalidInput, match=rf"port {port} .*driver_port"):
            supervise(cluster, NoDiscovery(), Site(), Limits(1, 1, 1), config, "test", Watcher())


def test_too_few_workers_end_the_job_with_a_sentence() -> None:
    program = CountingProgram(5)
    limits = Limits(2, 2, 2, gather_timeout=0.5, start_timeout=6.0)
    with pytest.raises(NotEnoughWorkers, match="2"):
        supervise(
            launcher(program, room=1), NoDiscovery(), Site(), limits, ElasticConfig(), "test", Watcher()
        )


def test_a_dead_proxy_in_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    program = CountingProgram(5)
    assert_exact(run(launcher(program, room=2), 2, Watcher()), program)
    assert os.environ["HTTP_PROXY"]
