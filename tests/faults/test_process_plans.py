"""Random fault plans on real processes: P1 to P4 after each. A failing plan is named by its seed, which replays it.

pytest tests/faults/test_process_plans.py -k "seed17 and not seed170"
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from spark_elastic.clock import SystemClock
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.testing.processes import ProcessLauncher
from tests.component.torch.job import (
    CLASSES,
    ROWS,
    WIDTH,
    Follower,
    Job,
    Paced,
    difference,
    launcher,
    ledger_of,
    make_data,
    train_elastic,
    train_plain,
)

PLANS, IN_EVERY_BUILD = 100, 3
LEASE = 1.0  # seconds


class Kind(Enum):
    CHILD = "kill a training process"
    SLOT = "kill a slot task"
    TWO = "kill two training processes at once"
    ALL_BUT_ONE = "kill every slot task but one"
    STOP = "stop a training process for longer than its lease"
    PAUSE = "stop a training process for less than its lease"
    DRAIN = "drain a host"


@dataclass(frozen=True)
class Blow:
    """What happens once step `step` of `epoch` is applied. victim: counted over the living slots."""

    epoch: int
    step: int
    kind: Kind
    victim: int


def plan_of(seed: int, job: Job) -> list[Blow]:
    rng = random.Random(seed)
    steps = -(-ROWS // (job.batch_size * job.workers))
    moments = sorted(
        (rng.randrange(job.epochs), rng.randrange(2, steps - 3)) for _ in range(rng.randint(1, 3))
    )
    return [Blow(*moment, rng.choice(list(Kind)), rng.randrange(job.workers)) for moment in moments]


@dataclass
class Misfortune:
    """Plays a plan on a job; also its discovery, through which hosts are asked to drain."""

    plan: list[Blow]
    cluster: ProcessLauncher | None = None
    struck: list[Blow] = field(default_factory=list)
    _post: Post | None = None
    _timers: list[threading.Timer] = field(default_factory=list)

    def start(self, post: Post) -> None:
        self._post = post

    def close(self) -> None:
        for timer in self._timers:
            timer.join()

    def follow(self, epoch: int, step: int) -> None:
        while self.plan and (epoch, step) >= (self.plan[0].epoch, self.plan[0].step):
            blow = self.plan.pop(0)
            self.struck.append(blow)
            self._strike(blow)

    def _strike(self, blow: Blow) -> None:
        assert self.cluster is not None
        assert self._post is not None
        jobs = sorted(self.cluster.slots())
        job = jobs[blow.victim % len(jobs)]
        match blow.kind:
            case Kind.CHILD:
                self._signal(job, signal.SIGKILL)
            case Kind.TWO:
                for each in jobs[:2]:
                    self._signal(each, signal.SIGKILL)
            case Kind.SLOT:
                self.cluster.kill(job)
            case Kind.ALL_BUT_ONE:
                for each in jobs:
                    if each != job:
                        self.cluster.kill(each)
            case Kind.STOP:
                self._stop(job, 2.5 * LEASE)
            case Kind.PAUSE:
                self._stop(job, 0.4 * LEASE)
            case Kind.DRAIN:
                self._post(DrainRequested(SystemClock().now(), "wanted elsewhere", host=f"host-{job}"))

    def _signal(self, job: int, sig: int) -> list[int]:
        """To the training process of a slot; its spare is the younger one."""
        assert self.cluster is not None
        children = psutil.Process(self.cluster.slots()[job]).children()
        for child in sorted(children, key=lambda each: each.create_time())[:1]:
            os.kill(child.pid, sig)
            return [child.pid]
        return []

    def _stop(self, job: int, seconds: float) -> None:
        for pid in self._signal(job, signal.SIGSTOP):
            timer = threading.Timer(seconds, _continue, [pid])
            timer.start()
            self._timers.append(timer)


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # its slot has killed it


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = torch.nn.Linear(WIDTH, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES)
    return Paced(torch.nn.Sequential(*layers)).double()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Store, Manifest, dict[str, torch.Tensor]]:
    """The job, its data and what a plain loop makes of them."""
    job = Job(net(), sgd, torch.nn.CrossEntropyLoss())
    store, manifest = make_data(tmp_path_factory.mktemp("data"))
    return job, store, manifest, train_plain(job, store, manifest)


def seeds() -> list[Any]:
    marks: Callable[[int], Any] = lambda seed: [pytest.mark.ci] if seed < IN_EVERY_BUILD else []  # noqa: E731
    return [pytest.param(seed, id=f"seed{seed}", marks=marks(seed)) for seed in range(PLANS)]


@pytest.mark.faults
@pytest.mark.native
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", seeds())
def test_p1_to_p4(
    seed: int, wanted: tuple[Job, Store, Manifest, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    job, store, manifest, plain = wanted
    misfortune = Misfortune(plan_of(seed, job))

    def make(task: Any) -> ProcessLauncher:
        misfortune.cluster = launcher(task, room=job.workers)
        return misfortune.cluster

    ours, result = train_elastic(
        job, store, manifest, str(tmp_path), Follower(misfortune.follow), make, misfortune, lease=LEASE
    )
    said = "\n".join([f"seed {seed}: {misfortune.struck}", *result.story])
    assert not misfortune.plan, said
    assert difference(ours, plain) < 1e-9, said
    seen = ledger_of(tmp_path)
    assert set(seen) == {(epoch, row) for epoch in range(job.epochs) for row in range(ROWS)}, said
    assert set(seen.values()) == {1}, said
