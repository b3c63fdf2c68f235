"""What a worker's process knows of its world: its collectives' thread, numbers that are reported, planned changes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import spark_elastic
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten import torch_state as elastic
from spark_elastic.handwritten.object_state import get_session
from spark_elastic.protocol.types import INITIAL_VERSION, HostUpdateResult, MembershipVersion, WorkerId
from spark_elastic.rendezvous.messages import WorkerUpdate
from spark_elastic.testing.fakes import FakeClock
from spark_elastic.worker.context import CollectiveThread, WorkerContext, set_context, start_call
from spark_elastic.worker.loop import DriverWatch
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager
from tests.full_process import refuse_next_thread

# ---- reported numbers and resources


@pytest.fixture
def told() -> Iterator[list[Any]]:
    heard: list[Any] = []
    handle: Any = SimpleNamespace(
        process_values={}, report_metrics=heard.append, report_position=lambda position: None
    )
    world: Any = SimpleNamespace(size=3)
    set_context(WorkerContext("w", world=world, handle=handle))
    yield heard
    set_context(None)


def test_reported_numbers_stay_when_a_commit_is_reported(told: list[Any]) -> None:
    spark_elastic.report(loss=np.float32(0.5), epoch=2, converged=True)
    session = get_session()
    assert session is not None
    session.report_commit(7)
    spark_elastic.report(loss=0.25)
    assert told == [
        {"loss": 0.5, "epoch": 2, "converged": 1.0, "world": 3},
        {"loss": 0.5, "epoch": 2, "converged": 1.0, "world": 3, "step": 7},
        {"loss": 0.25, "epoch": 2, "converged": 1.0, "world": 3, "step": 7},
    ]
    assert type(told[0]["converged"]) is float, "JSON's true is no number for the status page"
    session.checkpointer = SimpleNamespace(stall_seconds=0.5)  # type: ignore[assignment]
    spark_elastic.report(
        loss=torch.tensor(0.5, requires_grad=True)
    )  # a warning of its graph would be an error
    session.report_commit(8)
    assert told[-1] == {
        "loss": 0.5,
        "epoch": 2,
        "converged": 1.0,
        "world": 3,
        "step": 8,
        "checkpoint_seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss": "low"}, "loss is a str and no number"),
        ({"steps": 3}, "counts steps itself"),
        ({"epoch": float("nan")}, "takes a finite epoch, not nan"),
        ({"epoch": np.float32("-inf")}, "takes a finite epoch, not -inf"),
    ],
)
def test_report_refuses_what_is_no_number_and_reserved_names(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        spark_elastic.report(**given)


def test_a_process_that_is_no_worker_reports_nothing_and_has_no_resources(told: list[Any]) -> None:
    set_context(None)
    spark_elastic.report(loss=0.5)
    assert (told, spark_elastic.task_resources()) == ([], {})
    set_context(WorkerContext("w", resources={"gpu": ("2",)}))
    assert spark_elastic.task_resources() == {"gpu": ("2",)}


# ---- the thread of a group's collectives: order, errors, start and end


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


# ---- Horovod's WorkerNotificationManager: who hears of a planned change, when, and of which


DEADLINE = 10.0  # seconds


class Listener:
    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[float, HostUpdateResult]] = queue.SimpleQueue()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        self.heard.put((timestamp, update_res))


def _watch(*versions: MembershipVersion) -> None:
    """The driver answers with each version in turn; after the last the worker is to stop."""
    answers = iter(
        [WorkerUpdate(version) for version in versions[:-1]] + [WorkerUpdate(versions[-1], stop="done")]
    )
    driver: Any = SimpleNamespace(last_answered_at=lambda: 0.0, ask=lambda *asked: next(answers))
    DriverWatch(WorkerId("1-0.1"), driver, FakeClock(), 30.0)._watch(lambda event: None)


@pytest.fixture(autouse=True)
def _new_call() -> None:
    start_call()


def test_a_listener_is_called_once_for_each_announced_change() -> None:
    listener = Listener()
    elastic.WorkerNotificationManager().register_listener(listener)
    notification_manager.register_listener(listener)  # the same one
    joins = INITIAL_VERSION.next(update=HostUpdateResult.added)
    _watch(INITIAL_VERSION, joins, joins)
    assert listener.heard.get(timeout=DEADLINE)[1] == HostUpdateResult.added
    leaves = joins.next(update=HostUpdateResult.removed | HostUpdateResult.added)
    _watch(leaves)
    assert listener.heard.get(timeout=DEADLINE)[1] == HostUpdateResult.mixed
    _watch(leaves.next(update=HostUpdateResult.added).next(job_ends=True))  # the end is no change of hosts
    assert listener.heard.empty()


def test_removed_listeners_and_those_of_an_earlier_call_are_not_called() -> None:
    manager, removed, former, stays = WorkerNotificationManager(), Listener(), Listener(), Listener()
    manager.register_listener(former)
    start_call()
    manager.register_listener(removed)
    manager.register_listener(stays)
    manager.remove_listener(removed)
    manager.handle_hosts_updated(3.0, HostUpdateResult.removed)
    assert stays.heard.get(timeout=DEADLINE) == (3.0, HostUpdateResult.removed)
    assert removed.heard.empty()
    assert former.heard.empty()


def test_an_exception_in_a_listener_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    notification_manager.register_listener(cast("Any", SimpleNamespace()))  # it has no such method
    notification_manager.register_listener(listener)
    with caplog.at_level(logging.ERROR):
        notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)
        listener.heard.get(timeout=DEADLINE)
    assert "a listener of changes raised" in caplog.text


def test_listeners_for_whom_there_is_no_thread_do_not_end_the_watch_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener()
    notification_manager.register_listener(listener)
    joins = INITIAL_VERSION.next(update=HostUpdateResult.added)
    refuse_next_thread(monkeypatch)
    _watch(joins, joins.next(update=HostUpdateResult.removed))
    assert "listeners were not told of a change: can't start new thread" in caplog.text
    assert listener.heard.get(timeout=DEADLINE)[1] == HostUpdateResult.removed
