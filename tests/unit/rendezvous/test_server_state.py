"""What the server tells to whom, and its values: scopes, keys and their bounds."""

from __future__ import annotations

import tracemalloc

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.messages import NextWorld
from spark_elastic.protocol.types import Fence, Member, WorkerId, World
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.messages import CompareAndSet, Comparison, SlotCommands
from spark_elastic.rendezvous.server_state import (
    KeyValueStore,
    ServerState,
)


def _world(generation: int, *workers: str) -> World:
    members = tuple(Member(w, w[:-2], f"h{rank}", rank, 0, 1, 0, 1, None) for rank, w in enumerate(workers))
    return World(Fence(1, generation), members, None, "why")


def test_r10_an_older_abort_is_ignored() -> None:
    state = ServerState()
    state.publish(_world(1, "1-0.1"))
    state.publish(_world(2, "1-0.1"))
    state.abort(Fence(1, 1), "late")
    assert state.get_end_reason(Fence(1, 2)) is None
    assert state.find_next_world("1-0.1", Fence(1, 1)) == NextWorld(_world(2, "1-0.1").view_of("1-0.1"))


def test_what_a_loss_tells_a_member_is_short_and_does_not_grow_with_its_world() -> None:
    sizes = []
    for size in (66, 10_000):
        state = ServerState()
        workers = [f"{rank + 10000}-0.1" for rank in range(size)]
        state.addresses.update((WorkerId(worker), f"10.0.0.1:{worker[:5]}") for worker in workers)
        state.publish(_world(1, *workers[1:], workers[0]))
        assert state.find_addresses([0, size - 1]) == ("10.0.0.1:10001", "10.0.0.1:10000")
        state.abort(Fence(1, 1), "a member is lost")
        update = state.get_update(workers[7])
        state.publish(_world(2, *workers[1:30], *workers[31:], workers[0]))
        told = state.find_next_world(workers[7], Fence(1, 1))
        assert (update.end_reason, told.addresses, told.runs) == ("", (), ((0, 29), (30, size - 30)))
        sizes.append(len(codec.dumps(told, as_rows=True)) + len(codec.dumps(update, as_rows=True)))
    assert sizes[1] - sizes[0] < 20
    assert sizes[1] < 200  # bytes


def test_a_member_keeps_the_addresses_of_those_whom_it_knew() -> None:
    state = ServerState()
    before = [f"{number}-0.1" for number in range(1, 101)]
    state.publish(_world(1, *before))
    state.set_address(WorkerId("50-0.1"), "another:1")  # its program began again in another process
    state.abort(Fence(1, 1), "why")
    state.publish(_world(2, "1-0.1", "200-0.1", "201-0.1", *before[2:]))
    told = state.find_next_world(WorkerId("1-0.1"), Fence(1, 1))
    assert told.runs == ((0, 1), (-1, 2), (2, 47), (-1, 1), (50, 50))
    known = {0: "a", 1: "b", 2: "c", 49: "d", 50: "e", 99: "f"}
    assert told.find_known(known) == {0: "a", 3: "c", 51: "e", 100: "f"}
    # What a worker knows that left another world is of other ranks.
    assert state.find_next_world(WorkerId("1-0.1"), None).runs == ()
    every_other = _world(3, *before[::2], *(f"{number}-0.1" for number in range(300, 320)))
    state.publish(every_other)
    assert state.find_next_world(WorkerId("1-0.1"), Fence(1, 2)).runs == ()  # too many


def test_a_small_worlds_addresses_are_known_by_rank() -> None:
    assert NextWorld(addresses=("a", "b")).find_known({5: "old"}) == {0: "a", 1: "b"}


def test_the_first_reason_of_an_abort_and_of_the_jobs_end_stays() -> None:
    for decide in (lambda state, reason: state.abort(Fence(1, 1), reason), ServerState.end):
        state = ServerState()
        state.publish(_world(1, "1-0.1"))
        decide(state, "first")
        decide(state, "second")
        assert state.get_end_reason(Fence(1, 1)) == "first"
    assert state.get_stop_reason("1-0.1") == "first"
    assert state.get_commands("1-0", 0) == SlotCommands(0, (), "first")


def test_scopes_are_separate() -> None:
    store = KeyValueStore()
    store.set("a", "k", b"1")
    store.set("b", "k", b"2")
    assert store.get("a", ["k", "l"]) == (b"1", None)
    store.set("a", "j", b"1")
    assert store.list_keys("a", "") == ("k", "j")
    assert store.list_keys("a", "j") == ("j",)
    store.close("a")
    assert store.get("a", ["k"]) == (None,)
    store.close("a")


def test_reading_an_unknown_scope_makes_none() -> None:
    store = KeyValueStore(most_scopes=1)
    assert store.get("a", ["k"]) == (None,)
    store.set("b", "k", b"1")
    with pytest.raises(InvalidInput, match="scopes"):
        store.set("c", "k", b"1")


@pytest.mark.parametrize(
    "store",
    [
        KeyValueStore(value_bytes=3),
        KeyValueStore(key_bytes=0),
        KeyValueStore(total_bytes=3),
        KeyValueStore(most_keys=0),
    ],
)
def test_sizes_and_counts_are_limited(store: KeyValueStore) -> None:
    with pytest.raises(InvalidInput):
        store.set("a", "k", b"1234")
    assert store.get("a", ["k"]) == (None,)


def test_deleted_values_free_room() -> None:
    store = KeyValueStore(total_bytes=4, most_keys=1)
    for _ in range(3):
        store.set("a", "k", b"1234")
        store.set("a", "k", b"12")
        store.set("a", "k", b"4321")
        store.close("a")


def compare(key: str, expected: bytes | None, desired: bytes | None, token: str) -> CompareAndSet:
    return CompareAndSet("a", key, expected, desired, token)


def test_a_key_changes_only_from_the_expected_value() -> None:
    store = KeyValueStore(total_bytes=3)
    assert store.compare_and_set(compare("k", None, b"1", "t1")) == Comparison(True, b"1")
    assert store.compare_and_set(compare("k", None, b"2", "t2")) == Comparison(False, b"1")
    assert store.compare_and_set(compare("k", b"1", b"234", "t3")) == Comparison(True, b"234")
    assert store.compare_and_set(compare("k", b"234", None, "t4")) == Comparison(True, None)
    store.set("a", "l", b"567")  # there is room again


def test_a_request_that_is_sent_again_changes_nothing_again() -> None:
    store = KeyValueStore()
    first = store.compare_and_set(compare("k", None, b"1", "t1"))
    store.compare_and_set(compare("k", b"1", None, "t2"))
    assert store.compare_and_set(compare("k", None, b"1", "t1")) == first
    assert store.get("a", ["k"]) == (None,)
    for value in (b"1", b"3"):  # one that has failed returns the current value
        store.set("a", "k", value)
        assert store.compare_and_set(compare("k", None, b"2", "t3")) == Comparison(False, value)
        assert store.get("a", ["k"]) == (value,)


def test_comparisons_hold_no_values_beside_those_of_the_store() -> None:
    size = 1 << 20
    store = KeyValueStore(total_bytes=size)
    tracemalloc.start()
    try:
        for number in range(32):
            value = bytes(size - 1) + bytes([number])
            store.compare_and_set(compare("k", None, value, f"set {number}"))
            store.compare_and_set(compare("k", None, b"", f"refused {number}"))
            store.compare_and_set(compare("k", value, None, f"delete {number}"))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 * size
