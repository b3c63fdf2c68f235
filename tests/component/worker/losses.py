"""A counting job on plain processes, with actions of the test at chosen moments, such as killing a worker.

An action waits for its moment (a step of rank 0, a world), then runs in its own thread. A `Held` program takes its last
step when all actions are over and the condition of the test is met.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.driver.ports import Post
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fakes import CountingProgram, ProcessLauncher
from tests.component.injected_faults import list_workers
from tests.component.warm_slots import WarmLauncher
from tests.component.worker.moments import HeldProgram
from tests.journals import keep_journal


@dataclass(frozen=True)
class JobProgress:
    """How far the job has come."""

    step: int = 0  # the newest that rank 0 reported
    sizes: tuple[int, ...] = ()  # of all worlds so far
    lines: tuple[str, ...] = ()  # that workers wrote


Act = tuple[Callable[[JobProgress], bool], Callable[[], object]]


@dataclass
class Job(JobListener):
    """`size` workers on `room` slots (default: as many). `post` reaches the driver as discovery does.

    until: what must have come, besides the end of all acts, before a `Held` program takes its last step. faults: where
    they are off nothing is waited for. warm: slots are processes that earlier jobs had, and fork their workers.
    """

    program: CountingProgram
    size: int = 3
    room: int | None = None
    slots_per_host: int = 1
    config: ElasticConfig = field(default_factory=ElasticConfig)
    collective_timeout: float = 20.0
    until: Callable[[JobProgress], bool] = lambda now: True
    faults: bool = True
    warm: bool = True

    def __post_init__(self) -> None:
        launcher = WarmLauncher if self.warm else ProcessLauncher
        self.cluster = launcher(
            self.program,
            SystemClock(),
            slots_per_host=self.slots_per_host,
            room=self.room or self.size,
            collective_timeout=self.collective_timeout,
            spare_after=100.0,  # what a slot does with a spare is in test_slot_agent.py
        )
        self.moment = JobProgress()
        self.journal: list[str] = []  # its lines, once the job is over
        self.post: Post = lambda event: None
        self._acts: list[Act] = []
        self._played: list[Future[object]] = []
        self._lock = threading.RLock()

    def act_at_step(self, step: int, act: Callable[[], object], world: int = 1) -> None:
        """Run `act` when rank 0 has reported that step and the world of that number (1: the first) is published."""
        self._acts.append((lambda now: now.step >= step and len(now.sizes) >= world, act))

    def act_at_world(self, number: int, act: Callable[[], object]) -> None:
        """Run `act` when the world of that number is published."""
        self._acts.append((lambda now: len(now.sizes) >= number, act))

    def act_at_line(self, text: str, act: Callable[[], object]) -> None:
        """Run `act` when a worker has written a line with that text."""
        self._acts.append((lambda now: any(text in line for line in now.lines), act))

    def run(self, **limits: Any) -> LaunchResult:
        """Run the job to its end and check that its result is exact."""
        size = {"num_workers": self.size, "min_workers": 1, "max_workers": self.size}
        bounds = Limits(**{**size, "gather_timeout": 60.0, **limits})
        with ThreadPoolExecutor(thread_name_prefix="act") as self._pool:
            try:
                self._release(not self.faults)
                with keep_journal(self.config) as (config, self.journal):
                    result = supervise(self.cluster, self, DriverOptions(), bounds, config, "test", self)
            finally:
                wait(self._played)
                self._release(True)
        for act in self._played:
            act.result()
        sums = {json.loads(text)["sum"] for text in result.results if text != "null"}
        assert sums == {self.program.expected_sum()}, "a step was lost, repeated or half applied"
        return result

    def workers(self) -> list[psutil.Process]:
        return list_workers(self.cluster)

    # ---- discovery

    def start(self, post: Post) -> None:
        self.post = post

    def close(self) -> None:
        """Nothing."""

    # ---- listener

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        self._meet(lambda now: replace(now, lines=(*now.lines, line)))

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        self._meet(lambda now: replace(now, step=metrics["step"]))

    def on_world(self, size: int, reason: str) -> None:
        self._meet(lambda now: replace(now, sizes=(*now.sizes, size)))

    def _meet(self, change: Callable[[JobProgress], JobProgress]) -> None:
        with self._lock:
            self.moment = moment = change(self.moment)
            due = [act for when, act in self._acts if when(moment)]
            self._acts = [(when, act) for when, act in self._acts if not when(moment)]
            for act in due:
                self._played.append(self._pool.submit(act))
                self._played[-1].add_done_callback(lambda act: self._meet(lambda now: now))
            self._release(self._is_over())

    def _is_over(self) -> bool:
        """Nothing will come any more, or an act failed."""
        ended = [act for act in self._played if act.done()]
        has_played = not self._acts and len(ended) == len(self._played)
        return any(act.exception() for act in ended) or (has_played and self.until(self.moment))

    def _release(self, free: bool) -> None:
        if free and isinstance(self.program, HeldProgram):
            self.program.release()


def sizes(result: LaunchResult) -> list[int]:
    return [world.size for world in result.worlds]
