"""Repeatable torch, in one thread: small tensors on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.ops.workers import run_in_fake_world, run_on_engine, use_context_per_thread
from tests.unit.torch.worlds import World


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Runs a function on every rank of a world of fakes, each thread being a worker."""
    use_context_per_thread(monkeypatch)
    return run_in_fake_world


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> World:
    """The same over the real engine."""
    use_context_per_thread(monkeypatch)
    return run_on_engine
