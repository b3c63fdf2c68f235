"""Repeatable torch, in one thread: small tensors on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from spark_elastic.gradients import process_sets
from spark_elastic.handwritten import session as loop_session
from spark_elastic.horovod.torch import gradient_sync as rounds
from spark_elastic.worker import session
from spark_elastic.worker.context import GroupContext, WorkerContext
from tests.unit.ops.workers import run_in_fake_world, run_on_engine, use_context_per_thread
from tests.unit.torch.loops import CurrentWorker
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


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[CurrentWorker]:
    made, contexts = CurrentWorker(), list[GroupContext]()

    def get_context() -> WorkerContext | None:
        if not made.is_worker:
            return None
        contexts.append(made.group_context)
        return WorkerContext("w", group=made.group, group_context=made.group_context)

    monkeypatch.setattr(rounds, "get_context", get_context)
    monkeypatch.setattr(rounds, "get_process_context", lambda: made.process)
    for module in (session, loop_session):
        monkeypatch.setattr(module, "get_context", get_context)
    monkeypatch.setattr(process_sets, "get_context", get_context)
    yield made
    for context in contexts:
        context.collective_thread.close()
