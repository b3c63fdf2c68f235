"""The thread of a group's collectives: order, errors, start and end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spark_elastic.worker.context import EngineThread


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    made = EngineThread()
    yield made
    made.close()


def test_submitted_work_runs_in_order_in_one_thread_and_before_a_later_run(engine: EngineThread) -> None:
    seen: list[tuple[int, int]] = []
    gate = threading.Event()
    engine.submit(lambda: gate.wait(10))
    for number in range(3):
        engine.submit(lambda number=number: seen.append((number, threading.get_ident())))  # type: ignore[misc]
    gate.set()
    assert engine.run(lambda: [number for number, _ in seen]) == [0, 1, 2]
    assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()})
    assert len({thread for _, thread in seen}) == 1


def test_an_error_reaches_only_the_future_of_its_own_work(engine: EngineThread) -> None:
    broken = engine.submit(lambda: 1 // 0)
    fine = engine.submit(lambda: 7)
    engine.drain()
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert fine.result() == 7


def test_the_engine_thread_starts_with_its_first_work_and_again_after_a_close(
    engine: EngineThread,
) -> None:
    threads = threading.active_count()
    engine.drain()
    engine.close()
    assert engine.run(lambda: 1) == 1
    assert threading.active_count() == threads
    assert engine.submit(lambda: 2).result() == 2
    engine.close()
    assert engine.submit(lambda: 3).result() == 3
