"""Bitwise mode: one SHA-256 of the weights for every world of 1 to 8 workers and every fault plan, for four nets.

pytest -m faults tests/faults/test_bitwise.py -k "lstm and seed7"
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from tests.component.torch import bitwise, hand_written
from tests.component.torch.bitwise import NETS, SHARES, STEPS, train
from tests.component.torch.hand_written import Run
from tests.faults.fault_plans import stop_process

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(300)]

PLANS = 20
KINDS = ("kill a worker", "kill a slot", "stop a worker", "pause a worker", "drain a host", "another slot")

for module in (bitwise, hand_written):
    cloudpickle.register_pickle_by_value(sys.modules[module.__name__])


def arguments(name: str, holds: dict[int, int | str]) -> tuple[Any, ...]:
    """Of `train`; one net's rows come from a reading process."""
    return name, holds, int(name == "embedding")


@cache
def alone(name: str) -> str:
    """The weights' SHA-256 of one worker."""
    (result,) = Run(train, arguments(name, {}), room=1, num_workers=1).results()
    sha256: str = result["sha256"]
    return sha256


def check(run: Run, name: str) -> None:
    results = run.results()
    assert {result["sha256"] for result in results} == {alone(name)}
    assert max(result["trained"][-1] for result in results) == STEPS - 1


@pytest.mark.parametrize("workers", range(2, SHARES + 1))
@pytest.mark.parametrize("name", NETS)
def test_the_weights_are_those_of_one_worker(name: str, workers: int) -> None:
    run = Run(train, arguments(name, {}), room=workers, num_workers=workers)
    check(run, name)
    assert run.sizes() == [workers]


@pytest.mark.parametrize("seed", [pytest.param(seed, id=f"seed{seed}") for seed in range(PLANS)])
@pytest.mark.parametrize("name", NETS)
def test_the_weights_are_those_of_one_undisturbed_worker(name: str, seed: int, tmp_path: Path) -> None:
    """One to three blows; at the step of each, the workers wait until it was struck."""
    rng = random.Random(seed)
    workers = 1 + seed % SHARES
    plan = [(step, rng.choice(KINDS)) for step in sorted(rng.sample(range(2, STEPS - 2), rng.randint(1, 3)))]
    struck = [tmp_path / str(step) for step, _ in plan]
    holds: dict[int, int | str] = {step: str(file) for (step, _), file in zip(plan, struck, strict=True)}
    sizes = {"room": workers, "num_workers": workers, "max_workers": min(SHARES, workers + 1)}
    run = Run(train, arguments(name, holds), **sizes)
    continuing: list[threading.Timer] = []
    for (step, kind), file in zip(plan, struck, strict=True):
        run.at(step, lambda kind=kind, file=file: inject_fault(run, kind, rng, file.touch, continuing))
    try:
        check(run, name)
    finally:
        for timer in continuing:
            timer.join()
    assert all(file.exists() for file in struck)


def inject_fault(
    run: Run, kind: str, rng: random.Random, over: Callable[[], object], continuing: list[threading.Timer]
) -> None:
    try:
        while True:
            with suppress(psutil.NoSuchProcess):  # a slot or worker that was just ending: another one
                _inject_at_once(run, kind, rng, continuing)
                return
    finally:
        over()


def _inject_at_once(run: Run, kind: str, rng: random.Random, continuing: list[threading.Timer]) -> None:
    slots = sorted(run.cluster.slots())
    if kind == "another slot" or not slots:
        run.cluster.add_room(1)
        return
    slot = rng.choice(slots)
    if kind == "drain a host":
        run.drain(slot)
    elif kind == "kill a slot":
        run.cluster.kill(slot)
    elif workers := run.workers():
        worker = rng.choice(workers)
        if kind == "kill a worker":
            worker.kill()
            return
        seconds = 7.0 if kind == "stop a worker" else 0.7  # longer than the lease, or shorter
        continuing.append(stop_process(worker, seconds))
