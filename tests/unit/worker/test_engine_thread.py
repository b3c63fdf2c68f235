"""The engine's thread: order, errors, and when it lives."""

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


def test_work_runs_in_order_in_one_thread_and_run_comes_behind_it(engine: EngineThread) -> None:
    seen: list[tuple[int, int]] = []
    gate = threading.Event()
    engine.submit(lambda: gate.wait(10))
    for number in range(3):
        engine.submit(lambda number=number: seen.append((number, threading.get_ident())))  # type: ignore[misc]
    gate.set()
    assert engine.run(lambda: [number for number, _ in seen]) == [0, 1, 2]
    assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()})
    assert len({thread for _, thread in seen}) == 1


def test_an_error_is_of_its_own_work_alone(engine: EngineThread) -> None:
    broken = engine.submit(lambda: 1 // 0)
    fine = engine.submit(lambda: 7)
    engine.drain()
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert fine.result() == 7


def test_it_needs_no_thread_before_its_first_work_and_begins_again_after_its_end(
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
