"""Letters through a store: order, chunks, strangers, a store that fails, silence."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.data.store import Store, memory_store
from spark_elastic.errors import StoreError
from spark_elastic.state.store_channel import SEND_EVERY, ChannelEnd, StoreChannel
from spark_elastic.testing.fakes import FakeClock


class Pair:
    """Both sides, whose turns are taken by hand."""

    def __init__(self) -> None:
        self.store, self.clock = memory_store(), FakeClock()
        self.heard: dict[str, list[Any]] = {"a": [], "b": []}
        self.a, self.b = self.side("a", "b", b"key"), self.side("b", "a", b"key")

    def side(self, own: str, other: str, key: bytes) -> StoreChannel:
        return StoreChannel(
            ChannelEnd(self.store, "mail/1", key, own, other), self.heard[own].append, self.clock
        )


def test_what_was_posted_between_two_turns_is_one_object_and_comes_in_order() -> None:
    pair = Pair()
    for number in range(3):
        pair.a.send({"n": number})
    pair.a.poll()
    pair.a.send({"n": 3})
    assert len(pair.store.list("mail/1")) == 1
    pair.a.poll()
    pair.b.poll()
    assert pair.heard["b"] == [{"n": number} for number in range(4)]
    assert pair.store.list("mail/1") == []


def test_letters_without_the_key_are_never_acted_upon() -> None:
    pair = Pair()
    for number in range(2):
        stranger = pair.side("a", "b", b"another key")
        stranger._sent = number
        stranger.send({"cancel": "me"})
        stranger.poll()
        with pytest.raises(StoreError, match="not signed with the job's key"):
            pair.b.poll()
        pair.a.send({"n": number})
        pair.a.poll()  # takes the place of the stranger's
        pair.b.poll()
        assert pair.heard["b"] == [{"n": each} for each in range(number + 1)]


@pytest.mark.parametrize("length", [0, 30, 60])
def test_half_of_a_letter_is_looked_at_again(length: int) -> None:
    """A mount of an object store has no renames: a reader may see a part for a moment."""
    pair = Pair()
    pair.a.send({"results": ["42"]})
    pair.a.poll()
    (name,) = pair.store.list("mail/1")
    whole = pair.store.read_bytes(name)
    pair.store.write_bytes(name, whole[:length])
    for _ in range(20):
        with pytest.raises(StoreError, match="is not whole"):
            pair.b.poll()
        pair.clock.advance(1.0)
    pair.store.write_bytes(name, whole)
    pair.b.poll()
    assert pair.heard["b"] == [{"results": ["42"]}]
    assert not pair.store.exists(name)


def test_last_words_that_are_half_written_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side that is written to ends when the other's task has: its result may come a moment later."""
    pair = Pair()
    pair.a.send({"results": ["42"]})
    pair.a.poll()
    (name,) = pair.store.list("mail/1")
    whole = pair.store.read_bytes(name)
    pair.store.write_bytes(name, whole[:30])
    monkeypatch.setattr(pair.clock, "sleep", lambda seconds: pair.store.write_bytes(name, whole))
    pair.b.close(10.0)
    assert pair.heard["b"] == [{"results": ["42"]}]


def test_a_letter_is_bound_to_its_place() -> None:
    pair = Pair()
    pair.a.send({"launch": 1})
    pair.a.poll()
    first = pair.store.read_bytes("mail/1/b-00000000")
    pair.b.poll()
    pair.store.write_bytes("mail/1/b-00000001", first)
    with pytest.raises(StoreError):
        pair.b.poll()
    assert pair.heard["b"] == [{"launch": 1}]


def test_a_store_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.a.send({"n": 0})

    def fails(*arguments: Any) -> None:
        raise StoreError("full")

    with monkeypatch.context() as patched:
        patched.setattr(type(pair.store), "write_bytes", fails)
        with pytest.raises(StoreError):
            pair.a.poll()
    pair.a.send({"n": 1})
    pair.a.poll()
    pair.b.poll()
    assert pair.heard["b"] == [{"n": 0}, {"n": 1}]


def test_a_letter_that_was_written_although_the_store_said_no_is_no_letters_grave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other side may have read it by the time that it is written again, with what was posted since."""
    pair = Pair()
    write = Store.write_bytes

    def writes_and_fails(store: Store, name: str, content: bytes) -> None:
        write(store, name, content)
        raise StoreError("the answer was lost")

    pair.a.send({"n": 0})
    with monkeypatch.context() as failing:
        failing.setattr(Store, "write_bytes", writes_and_fails)
        with pytest.raises(StoreError):
            pair.a.poll()
    pair.b.poll()
    pair.a.send({"n": 1})
    for _ in range(2):
        pair.a.poll()
        pair.b.poll()
    assert pair.heard["b"] == [{"n": 0}, {"n": 1}]


def test_a_letter_that_cannot_be_deleted_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.a.send({"n": 0})
    pair.a.poll()

    def fails(*arguments: Any) -> None:
        raise StoreError("gone for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(type(pair.store), "delete", fails)
        with pytest.raises(StoreError):
            pair.b.poll()
    pair.b.poll()
    assert pair.heard["b"] == [{"n": 0}]


def test_silence_is_broken_now_and_then() -> None:
    pair = Pair()
    pair.a.poll()
    assert pair.store.list("mail/1") == []
    pair.clock.advance(SEND_EVERY)
    pair.a.poll()
    pair.b.poll()
    assert pair.heard["b"] == []
    assert pair.b.last_seen == pair.clock.now()


@pytest.mark.parametrize("started", [True, False])
def test_an_end_sends_what_waits(started: bool) -> None:
    pair = Pair()
    if started:
        pair.a.start()
    pair.a.send({"n": 0})
    pair.a.close(10)
    pair.b.poll()
    assert pair.heard["b"] == [{"n": 0}]


@pytest.mark.parametrize(("failures", "arrives"), [(3, True), (1000, False)])
def test_last_words_are_said_until_the_store_takes_them_or_the_time_is_over(
    failures: int, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    pair.a.send({"results": [1]})
    left, write = [None] * failures, type(pair.store).write_bytes

    def fails_at_first(*arguments: Any) -> None:
        if left:
            left.pop()
            raise StoreError("gone for a moment")
        write(*arguments)

    monkeypatch.setattr(type(pair.store), "write_bytes", fails_at_first)
    pair.a.close(10.0)
    left.clear()
    pair.b.poll()
    assert pair.heard["b"] == ([{"results": [1]}] if arrives else [])
