"""Messages through a store: their order, foreign keys, a store that fails, silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from spark_elastic.clusters.coordinator import (
    POLL_EVERY,
    SEND_EVERY,
    SILENT_AFTER,
    ChannelEnd,
    StoreChannel,
    wait_until_silent,
)
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


@dataclass(frozen=True)
class Note:
    n: int


def fail(*arguments: Any) -> None:
    raise StoreError("gone for a moment")


class Pair:
    """Both sides, which are polled by hand."""

    def __init__(self) -> None:
        self.store, self.clock = make_memory_store(), FakeClock()
        self.heard: dict[str, list[Any]] = {"a": [], "b": []}
        self.a, self.b = self.open_side("a", "b", b"key"), self.open_side("b", "a", b"key")

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.a.send(Note(number))
        self.a.poll()

    def open_side(self, own: str, other: str, key: bytes) -> StoreChannel:
        end = ChannelEnd(self.store, "channels/1", key, own, other)
        return StoreChannel(end, [Note], self.heard[own].append, self.clock)


def test_messages_sent_between_two_polls_are_one_object_and_arrive_in_order() -> None:
    pair = Pair()
    pair.send(0, 1, 2)
    pair.a.send(Note(3))
    assert len(pair.store.list("channels/1")) == 1
    pair.a.poll()
    pair.b.poll()
    assert pair.heard["b"] == [Note(number) for number in range(4)]
    assert pair.store.list("channels/1") == ["channels/1/b-00000001"], "the newest, a sign of life"


def test_messages_without_the_key_are_never_delivered() -> None:
    pair = Pair()
    for number in range(2):
        foreign = pair.open_side("a", "b", b"another key")
        foreign._sent = number
        foreign.send(Note(-1))
        foreign.poll()
        with pytest.raises(StoreError, match="not signed with the job's key"):
            pair.b.poll()
        pair.a.send(Note(number))
        pair.a.poll()  # overwrites the foreign object
        pair.b.poll()
        assert pair.heard["b"] == [Note(each) for each in range(number + 1)]


@pytest.mark.parametrize("length", [0, 30, 60])
@pytest.mark.parametrize("closes", [False, True])
def test_a_half_written_object_is_read_again(
    length: int, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount of an object store has no renames: a reader may see a part for a moment. The side that is written to
    ends when the other's task has: its result may come a moment later."""
    pair = Pair()
    pair.send(42)
    (name,) = pair.store.list("channels/1")
    whole = pair.store.read_bytes(name)
    pair.store.write_bytes(name, whole[:length])
    if closes:
        monkeypatch.setattr(pair.clock, "sleep", lambda seconds: pair.store.write_bytes(name, whole))
        pair.b.close(10.0)
    else:
        for _ in range(20):
            with pytest.raises(StoreError, match="is not whole"):
                pair.b.poll()
            pair.clock.advance(1.0)
        pair.store.write_bytes(name, whole)
        pair.b.poll()
    assert pair.heard["b"] == [Note(42)]


def test_an_object_verifies_only_under_its_own_name() -> None:
    pair = Pair()
    pair.send(1)
    first = pair.store.read_bytes("channels/1/b-00000000")
    pair.b.poll()
    pair.store.write_bytes("channels/1/b-00000001", first)
    with pytest.raises(StoreError):
        pair.b.poll()
    assert pair.heard["b"] == [Note(1)]


@pytest.mark.parametrize(("call", "failing"), [("write_bytes", "a"), ("delete", "b")])
def test_a_failing_store_neither_loses_nor_repeats_a_message(
    monkeypatch: pytest.MonkeyPatch, call: str, failing: str
) -> None:
    pair = Pair()
    pair.send(0)
    pair.b.poll()
    pair.a.send(Note(1))
    if failing == "b":
        pair.a.poll()
    with monkeypatch.context() as patched:
        patched.setattr(type(pair.store), call, fail)
        with pytest.raises(StoreError):
            getattr(pair, failing).poll()
    pair.b.poll()
    pair.send(2)
    pair.b.poll()
    assert pair.heard["b"] == [Note(0), Note(1), Note(2)]


def test_a_write_that_succeeded_although_it_raised_loses_no_later_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other side may have read it by the time that it is written again, with what was posted since."""
    pair = Pair()
    write = Store.write_bytes

    def write_and_fail(store: Store, name: str, content: bytes) -> None:
        write(store, name, content)
        raise StoreError("the answer was lost")

    pair.a.send(Note(0))
    with monkeypatch.context() as failing:
        failing.setattr(Store, "write_bytes", write_and_fail)
        with pytest.raises(StoreError):
            pair.a.poll()
    pair.b.poll()
    pair.a.send(Note(1))
    for _ in range(2):
        pair.a.poll()
        pair.b.poll()
    assert pair.heard["b"] == [Note(0), Note(1)]


def test_a_side_without_messages_sends_a_sign_of_life() -> None:
    pair = Pair()
    pair.a.poll()
    assert pair.store.list("channels/1") == []
    pair.clock.advance(SEND_EVERY)
    pair.a.poll()
    pair.b.poll()
    assert pair.heard["b"] == []
    assert pair.b.last_seen == pair.clock.now()


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize(("failures", "arrives"), [(0, True), (3, True), (1000, False)])
def test_close_sends_waiting_messages_until_the_store_succeeds_or_the_time_is_over(
    started: bool, failures: int, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    left, write = [None] * failures, type(pair.store).write_bytes

    def fail_at_first(*arguments: Any) -> None:
        if left:
            left.pop()
            fail()
        write(*arguments)

    monkeypatch.setattr(type(pair.store), "write_bytes", fail_at_first)
    if started:
        pair.a.start()
    pair.a.send(Note(1))
    pair.a.close(10.0)
    left.clear()
    pair.b.poll()
    assert pair.heard["b"] == ([Note(1)] if arrives else [])


class ClockWithAction(FakeClock):
    """Does something at each sleep."""

    def __init__(self, act: Callable[[float], None]) -> None:
        super().__init__()
        self._act = act

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._act(self.now())


@pytest.mark.parametrize(("until", "tolerance"), [(100, SILENT_AFTER), (0, POLL_EVERY)])
def test_a_copy_of_a_side_waits_until_the_first_is_silent(until: float, tolerance: float) -> None:
    """One that has sent nothing is. The reader keeps the newest object, by which the copy sees that the first lives."""
    store = make_memory_store()

    def exchange(now: float) -> None:
        if now < until:
            first.poll()
        client.poll()

    clock = ClockWithAction(exchange)
    end = ChannelEnd(store, "channels/1", b"key", "task", "client")
    first = StoreChannel(end, [Note], fail, clock)
    client = StoreChannel(replace(end, own="client", other="task"), [Note], lambda note: None, clock)
    wait_until_silent(end, clock)
    assert clock.now() == pytest.approx(until + SILENT_AFTER, abs=tolerance)
    assert len([name for name in store.list("channels/1") if "/client-" in name]) <= 1


def test_a_failing_store_does_not_make_a_side_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_memory_store()
    listed = type(store).list

    def look(self: object, name: str) -> list[str]:
        if clock.now() < 60:
            raise StoreError("gone for a minute")
        return listed(store, name)

    monkeypatch.setattr(type(store), "list", look)
    clock = FakeClock()
    wait_until_silent(ChannelEnd(store, "channels/1", b"key", "task", "client"), clock)
    assert clock.now() >= 60
