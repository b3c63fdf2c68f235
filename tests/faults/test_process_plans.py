"""Random fault plans on real processes: P1 to P4 after each. A failing plan is named by its seed, which replays it.

pytest tests/faults/test_process_plans.py -k "seed17 and not seed170"
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.clock import SystemClock
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.testing.fakes import ProcessLauncher
from tests.component.injected_faults import find_worker
from tests.component.torch.job import (
    PACE,
    ROWS,
    Follower,
    Job,
    LauncherFactory,
    difference,
    ledger_of,
    make_data,
    mlp,
    sgd,
    train_elastic,
    train_plain,
)
from tests.faults.fault_plans import Kind, PlannedFault, draw_plan, stop_process

PLANS, IN_EVERY_BUILD = 100, 1
LEASE = 1.0  # seconds


@dataclass
class FaultPlayer:
    """Plays a plan on a job; also its discovery, through which hosts are asked to drain. A fault that would leave
    nobody who holds the state is put off until a replacement does: with it, the job would rightly begin anew."""

    plan: list[PlannedFault]
    worlds: list[int] = field(default_factory=list)
    cluster: ProcessLauncher | None = None
    struck: list[PlannedFault] = field(default_factory=list)
    put_off: bool = False
    _post: Post | None = None
    _timers: list[threading.Timer] = field(default_factory=list)
    _members: set[int] = field(default_factory=set)  # jobs whose training process holds the state
    _before: int = 0  # how many worlds there had been at the last fault
    _seen: int = 0  # and when the last step was told

    def start(self, post: Post) -> None:
        self._post = post

    def close(self) -> None:
        for timer in self._timers:
            timer.join()

    def follow(self, epoch: int, step: int) -> None:
        self._note_members()
        while self.plan and (epoch, step) >= (self.plan[0].epoch, self.plan[0].step):
            victims = self._victims(self.plan[0])
            self.put_off = not self._members - set(victims)
            if self.put_off:
                return
            self.struck.append(self.plan.pop(0))
            self._inject(self.struck[-1].kind, victims)

    def _note_members(self) -> None:
        """All slots are, once a world of all of them, formed since the last fault, has taken a step."""
        assert self.cluster is not None
        jobs, formed = set(self.cluster.slots()), len(self.worlds)
        if self._before < formed == self._seen and self.worlds[-1] == len(jobs):
            self._members = jobs
        self._members &= jobs
        self._seen = formed

    def _victims(self, fault: PlannedFault) -> list[int]:
        assert self.cluster is not None
        jobs = sorted(self.cluster.slots())
        match fault.kind:
            case Kind.TWO:
                return jobs[:2]
            case Kind.ALL_BUT_ONE:
                spared = sorted(self._members)[fault.victim % len(self._members)] if self._members else None
                return [job for job in jobs if job != spared]
            case _:
                return [jobs[fault.victim % len(jobs)]]

    def _inject(self, kind: Kind, victims: list[int]) -> None:
        assert self.cluster is not None
        assert self._post is not None
        for job in victims:
            match kind:
                case Kind.CHILD | Kind.TWO:
                    for child in find_worker(self.cluster.slots()[job]):
                        child.kill()
                case Kind.SLOT | Kind.ALL_BUT_ONE:
                    self.cluster.kill(job)
                case Kind.STOP:
                    self._stop(job, 2.5 * LEASE)
                case Kind.PAUSE:
                    self._stop(job, 0.4 * LEASE)
                case Kind.DRAIN:
                    host = f"host-{job}"
                    self._post(DrainRequested(SystemClock().now(), "wanted elsewhere", host=host))
        if kind is not Kind.PAUSE:
            self._members -= set(victims)
            self._before = len(self.worlds)

    def _stop(self, job: int, seconds: float) -> None:
        assert self.cluster is not None
        workers = find_worker(self.cluster.slots()[job])
        self._timers += [stop_process(worker, seconds) for worker in workers]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Store, Manifest, dict[str, torch.Tensor]]:
    """The job, its data and what a plain loop makes of them."""
    job = Job(mlp(PACE), sgd, torch.nn.CrossEntropyLoss())
    store, manifest = make_data(tmp_path_factory.mktemp("data"))
    return job, store, manifest, train_plain(job, store, manifest)


def seeds() -> list[Any]:
    marks: Callable[[int], Any] = lambda seed: [pytest.mark.ci] if seed < IN_EVERY_BUILD else []  # noqa: E731
    return [pytest.param(seed, id=f"seed{seed}", marks=marks(seed)) for seed in range(PLANS)]


@pytest.mark.faults
@pytest.mark.native
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", seeds())
def test_p1_to_p4_hold_under_random_fault_plans(
    seed: int, wanted: tuple[Job, Store, Manifest, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    job, store, manifest, plain = wanted
    steps = -(-ROWS // (job.batch_size * job.workers))
    misfortune = FaultPlayer(draw_plan(seed, job.epochs, steps, job.workers))
    follower = Follower(misfortune.follow, misfortune.worlds)

    def make(task: Any) -> ProcessLauncher:
        misfortune.cluster = LauncherFactory(job.workers, spares=True)(task)
        return misfortune.cluster

    ours, result = train_elastic(job, store, manifest, str(tmp_path), follower, make, misfortune, lease=LEASE)
    said = "\n".join([f"seed {seed}: {misfortune.struck}", *map(str, result.worlds)])
    assert misfortune.put_off or not misfortune.plan, said
    assert difference(ours, plain) < 1e-9, said
    seen = ledger_of(tmp_path)
    assert set(seen) == {(epoch, row) for epoch in range(job.epochs) for row in range(ROWS)}, said
    assert set(seen.values()) == {1}, said
