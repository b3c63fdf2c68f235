"""Horovod's `WorkerNotificationManager`: who hears of a planned change, when, and of which."""

from __future__ import annotations

import logging
import queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spark_elastic.handwritten import torch_state as elastic
from spark_elastic.protocol.types import INITIAL_VERSION, HostUpdateResult, MembershipVersion, WorkerId
from spark_elastic.rendezvous.messages import WorkerUpdate
from spark_elastic.testing.fakes import FakeClock
from spark_elastic.worker.context import start_call
from spark_elastic.worker.loop import DriverWatch
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager
from tests.full_process import refuse_next_thread

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
