"""Repeatable torch, in one thread: small tensors on a busy machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elastic_collectives import Group
from spark_elastic.ops import process_sets
from spark_elastic.torch.gradients import gradient_sync as rounds
from spark_elastic.worker import seat
from spark_elastic.worker.context import Current, Floor
from tests.unit.ops.workers import among_fakes, become, per_thread
from tests.unit.torch.loops import Here
from tests.unit.torch.worlds import World, in_a_world


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Runs a function on every rank of a world of fakes, each thread being a worker."""
    per_thread(monkeypatch)
    return among_fakes


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> World:
    """The same over the real engine."""
    per_thread(monkeypatch)

    def run(size: int, work: Callable[[Group], Any]) -> list[Any]:
        def be(group: Group) -> Any:
            become(group)
            return work(group)

        return in_a_world(size, be)

    return run


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    made, floors = Here(), list[Floor]()

    def current() -> Current | None:
        if not made.is_worker:
            return None
        floors.append(made.floor)
        return Current("w", group=made.group, floor=made.floor)

    monkeypatch.setattr(rounds, "current", current)
    monkeypatch.setattr(rounds, "floor_of_process", lambda: made.process)
    monkeypatch.setattr(seat, "current", current)
    monkeypatch.setattr(process_sets, "current", current)
    yield made
    for floor in floors:
        floor.engine.close()
