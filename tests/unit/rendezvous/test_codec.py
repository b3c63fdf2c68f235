"""Everything that the wire can carry comes back as it was; everything else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.protocol.messages import (
    DriverRequest,
    Heartbeat,
    NextWorld,
    RegisterSlot,
    RequestNextWorld,
)
from spark_elastic.protocol.types import Fence, Member, Phase, Position, SlotId, WorkerId, WorldView
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.messages import (
    REQUESTS,
    SetValues,
    SlotCommands,
    Values,
    WatchWorker,
    WorkerToStop,
    path_of,
    reply_of,
)

NAMES = st.text(max_size=20).filter(lambda text: "\ud800" not in text)
POSITIONS = st.builds(Position, st.integers(0, 9), st.sampled_from(Phase), st.integers(0, 10**9))
FENCES = st.builds(Fence, st.integers(0, 9), st.integers(0, 10**6))
NUMBERS = st.integers(0, 10**6)
SLOTS = st.builds(SlotId.build, NUMBERS, NUMBERS)
WORKERS = st.builds(WorkerId.build, SLOTS, NUMBERS)
MEMBERS = st.builds(Member, WORKERS, SLOTS, NAMES, *[st.integers(0, 64)] * 5, position=st.none() | POSITIONS)


@given(
    st.builds(
        WorldView,
        fence=FENCES,
        size=st.integers(1, 10_000),
        me=MEMBERS,
        host_ranks=st.lists(st.integers(0, 64), max_size=3).map(tuple),
        source=st.none() | st.integers(0, 2),
        position=st.none() | POSITIONS,
        receives=st.booleans(),
        has_receivers=st.booleans(),
        reason=NAMES,
    ),
    st.lists(NAMES, max_size=3).map(tuple),
)
def test_worlds_come_back_as_they_were(world: WorldView, addresses: tuple[str, ...]) -> None:
    reply = NextWorld(world, addresses=addresses)
    assert codec.read(NextWorld, codec.loads(codec.dumps(reply))) == reply


@given(FENCES, st.binary(max_size=100))
def test_bytes_come_back_as_they_were(fence: Fence, blob: bytes) -> None:
    request = SetValues(f"generation/{fence.generation}", ("a", "b"), (blob, b""))
    assert codec.read(SetValues, codec.loads(codec.dumps(request))) == request
    reply = Values((blob, None))
    assert codec.read(Values, codec.loads(codec.dumps(reply))) == reply


@given(st.none() | FENCES, st.none() | POSITIONS, st.lists(WORKERS, max_size=3).map(tuple))
def test_absent_values_come_back_as_absent(
    fence: Fence | None, position: Position | None, suspects: tuple[WorkerId, ...]
) -> None:
    request = RequestNextWorld("1-0.1", fence, position, suspects, "é – ✓", True)
    assert codec.read(RequestNextWorld, codec.loads(codec.dumps(request))) == request


@pytest.mark.parametrize(
    "message",
    [
        RegisterSlot("1-0", "a", 1, facts={"pids": [1, 2], "torch": {"version": "2.13"}, "gpu": None}),
        SlotCommands(2, (WorkerToStop("1-0.1", "x", True),), None),
    ],
)
def test_facts_and_nested_messages_come_back_as_they_were(message: Any) -> None:
    assert codec.read(type(message), codec.loads(codec.dumps(message))) == message


@pytest.mark.parametrize("request_class", REQUESTS)
def test_every_request_has_a_reader_and_a_path_of_its_own(request_class: type[DriverRequest[Any]]) -> None:
    for cls in (request_class, reply_of(request_class)):
        with pytest.raises(codec.MalformedMessage, match=cls.__name__):
            codec.read(cls, None)
    assert [path_of(cls) for cls in REQUESTS].count(path_of(request_class)) == 1


@pytest.mark.parametrize(
    ("cls", "value", "where"),
    [
        (Heartbeat, {"slot": 1}, "Heartbeat.slot must be str, not int"),
        (Heartbeat, {}, "Heartbeat lacks slot"),
        (Heartbeat, {"slot": "1-0.1"}, "Heartbeat.slot: '1-0.1' is no slot id"),
        (Heartbeat, {"slot": "1-0", "worker": "1-0"}, "Heartbeat.worker: '1-0' is no worker id"),
        (Heartbeat, {"slot": "1-0", "rank": 1}, "Heartbeat has no field 'rank'"),
        (
            WatchWorker,
            {"worker": "1-0.1", "ended_fence": None, "version": {"number": True}},
            "version.number must be int, not bool",
        ),
        (
            WatchWorker,
            {"worker": "1-0.1", "ended_fence": {"attempt": 1}, "version": {}},
            "ended_fence lacks generation",
        ),
        (Position, {"epoch": 1, "phase": 9, "step": 0}, "phase must be one of"),
        (Values, {"values": "x"}, "values must be a list"),
        (Values, {"values": ["%"]}, r"values must be base64"),
        (Values, {"values": [3]}, "values must be base64"),
        (RegisterSlot, {"slot": "1-0", "host": "", "launch": 1, "facts": []}, "facts must be an object"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(cls: type[Any], value: object, where: str) -> None:
    with pytest.raises(codec.MalformedMessage) as refused:
        codec.read(cls, value)
    assert where in str(refused.value)


@pytest.mark.parametrize(
    "body", [b"", b"1", b"[1]", b"{", b"\xff", b"[" * 10**6, b'{"a": NaN}', b'{"a": Infinity}']
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(codec.MalformedMessage):
        codec.loads(body)


def test_messages_are_plain_json() -> None:
    text = json.loads(codec.dumps(SetValues("loop", ("a",), (b"\x00",))))
    assert text == {"scope": "loop", "keys": ["a"], "values": ["AA=="]}


def test_a_tuple_of_fixed_form_has_each_part_checked() -> None:
    hint = tuple[tuple[str, int], ...] | None
    assert codec.read_as(hint, [["a", 1], ["b", 2]], "hosts") == (("a", 1), ("b", 2))
    assert codec.read_as(hint, None, "hosts") is None
    with pytest.raises(codec.MalformedMessage, match="hosts must be int, not str"):
        codec.read_as(hint, [["a", "b"]], "hosts")
    with pytest.raises(codec.MalformedMessage, match="hosts must be a list of 2"):
        codec.read_as(hint, [["a", 1, 2]], "hosts")


def test_large_messages_are_compressed() -> None:
    small, large = b'{"v":1}', b'{"v":"' + b"x" * 10_000 + b'"}'
    assert codec.compress(small) == small
    assert len(codec.compress(large)) < 1000
    for text in (small, large):
        assert codec.decompress(codec.compress(text)) == text
    with pytest.raises(codec.MalformedMessage):
        codec.decompress(b"neither")


def test_text_that_utf8_cannot_encode_does_not_stop_a_message() -> None:
    """The name of a file, as Python reads one of other bytes, in the traceback of a failed worker."""
    assert codec.loads(codec.dumps({"traceback": "no file caf\udce9"})) == {"traceback": "no file caf?"}
