"""Repeatable torch, in one thread, where a test's module uses it; and worlds of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds import Runner, run_in_fake_world, run_on_engine, use_context_per_thread


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest) -> Iterator[None]:
    torch = getattr(request.module, "torch", None)
    if torch is None:
        yield
        return
    torch.set_num_threads(1)  # small tensors on a busy machine
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        yield


@pytest.fixture
def context_per_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    use_context_per_thread(monkeypatch)


@pytest.fixture
def world(context_per_thread: None) -> Runner:
    """Runs a function on every rank of a world of fakes, each thread being a worker."""
    return run_in_fake_world


@pytest.fixture
def engine(context_per_thread: None) -> Runner:
    """The same over the real engine."""
    return run_on_engine
