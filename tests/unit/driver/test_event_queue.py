"""Beats wait for the next other event or the reader's patience; nothing overtakes anything."""

from __future__ import annotations

import queue
import threading

import pytest

from spark_elastic.driver.loop import EventQueue
from spark_elastic.protocol.events import CancelRequested, Received
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import SlotId

BEAT = Received(1.0, Heartbeat(SlotId("1-0"), "", ""))
CANCEL = CancelRequested(2.0, "enough")


class WaitedEvent(threading.Event):
    """Says whether somebody has come to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited.set()
        return super().wait(timeout)


def test_events_keep_their_order() -> None:
    inbox = EventQueue()
    for event in (BEAT, CANCEL, BEAT, None):
        inbox.put(event)
    assert [inbox.get(5.0) for _ in range(4)] == [BEAT, CANCEL, BEAT, None]
    with pytest.raises(queue.Empty):
        inbox.get(0.0)


@pytest.mark.parametrize(("event", "woken"), [(BEAT, False), (CANCEL, True), (None, True)])
def test_a_heartbeat_does_not_wake_the_driver_loop(
    event: Heartbeat | CancelRequested | None, woken: bool
) -> None:
    inbox, bell, taken = EventQueue(), WaitedEvent(), threading.Event()
    inbox._wakeup = bell

    def take() -> None:
        inbox.get(30.0)
        taken.set()

    reader = threading.Thread(target=take)
    reader.start()
    assert bell.awaited.wait(10.0)
    inbox.put(event)
    assert taken.wait(0.2 if not woken else 10.0) is woken
    inbox.put(CANCEL)
    reader.join()


def test_a_heartbeat_is_taken_at_the_end_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = EventQueue()
    monkeypatch.setattr(inbox._wakeup, "wait", lambda seconds: inbox.put(BEAT))
    assert inbox.get(0.5) is BEAT
