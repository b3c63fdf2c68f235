"""Repeatable torch, in one thread: small tensors on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from spark_elastic.ops import world as ops_world
from spark_elastic.torch.gradients import rounds
from spark_elastic.worker import seat
from spark_elastic.worker.context import Current, Floor
from tests.unit.torch.loops import Here


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield


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
    monkeypatch.setattr(ops_world, "current", current)
    yield made
    for floor in floors:
        floor.engine.close()
