"""The thread of a group's collectives: order, errors, start and end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spark_elastic.worker.context import CollectiveThread
from tests.full_process import refuse_next_thread


@pytest.fixture
def thread() -> Iterator[CollectiveThread]:
    made = CollectiveThread()
    yield made
    made.close()


def test_submitted_work_runs_in_order_in_one_thread_and_before_a_later_run(thread: CollectiveThread) -> None:
    seen: list[tuple[int, int]] = []
    gate = threading.Event()
    thread.submit(lambda: gate.wait(10))
    for number in range(3):
        thread.submit(lambda number=number: seen.append((number, threading.get_ident())))  # type: ignore[misc]
    gate.set()
    assert thread.drain_and_call(lambda: [number for number, _ in seen]) == [0, 1, 2]
    assert {ident for _, ident in seen}.isdisjoint({threading.get_ident()})
    assert len({ident for _, ident in seen}) == 1
    broken, fine = thread.submit(lambda: 1 // 0), thread.submit(lambda: 7)
    thread.drain()
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert fine.result() == 7


def test_the_thread_starts_with_its_first_work_and_again_after_a_close(thread: CollectiveThread) -> None:
    threads = threading.active_count()
    thread.drain()
    thread.close()
    assert thread.drain_and_call(lambda: 1) == 1
    assert threading.active_count() == threads
    assert thread.submit(lambda: 2).result() == 2
    thread.close()
    assert thread.submit(lambda: 3).result() == 3


def test_a_thread_that_failed_starts_later(thread: CollectiveThread, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_next_thread(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.submit(lambda: 1)
    assert thread.submit(lambda: 2).result(20.0) == 2
