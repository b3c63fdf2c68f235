"""Everything that the wire can carry comes back as it was; everything else is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spark_elastic.clusters.local.launcher import LocalSlot
from spark_elastic.protocol.messages import (
    DriverRequest,
    Heartbeat,
    RegisterSlot,
)
from spark_elastic.protocol.types import Fence, Phase, Position, SlotId, WorkerId
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.messages import (
    REQUESTS,
    Report,
    SetValues,
    Values,
    WatchWorker,
    WorkerUpdate,
    path_of,
    reply_of,
)
from spark_elastic.worker.handover import Header

NUMBERS = st.integers(0, 10**6)
st.register_type_strategy(SlotId, st.builds(SlotId.build, NUMBERS, NUMBERS))
st.register_type_strategy(WorkerId, st.builds(WorkerId.build, st.from_type(SlotId), NUMBERS))
RECORDS = [*dict.fromkeys((*REQUESTS, *map(reply_of, REQUESTS))), Header, LocalSlot]
LEAVES = st.none() | st.integers() | st.text()
JSON = st.dictionaries(st.text(), LEAVES | st.lists(LEAVES) | st.dictionaries(st.text(), LEAVES))
MORE = {RegisterSlot: {"facts": JSON}, Report: {"numbers": JSON}}


@pytest.mark.parametrize("cls", RECORDS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_travels_comes_back_as_it_was(cls: type[Any], data: st.DataObject) -> None:
    """Drawn from the type hints: a new class, or a new field, is covered on the day it is written."""
    drawn = {field.name: ... for field in fields(cls)} | MORE.get(cls, {})
    record = data.draw(st.builds(cls, **drawn))
    assume(not re.search(r"=-?(nan|inf)\b", repr(record)))
    assert codec.from_line(cls, codec.to_line(record)) == record
    assert codec.read(cls, json.loads(codec.dumps(record, as_rows=True))) == record


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


def test_a_row_has_no_fields_at_their_default_behind_the_last_other_one() -> None:
    assert codec.dumps(WorkerUpdate(), as_rows=True) == b"[]"
    assert codec.dumps(WorkerUpdate(ended_fence=Fence(1, 3)), as_rows=True) == b"[[],[1,3]]"
    assert codec.dumps(Position(0, Phase.TRAIN, 0), as_rows=True) == b"[0,0,0]"  # no field has a default
    with pytest.raises(codec.MalformedMessage, match="WorkerUpdate must be an object or a row of 4"):
        codec.read(WorkerUpdate, [[], None, "", None, 1])
    with pytest.raises(codec.MalformedMessage, match="ended_fence lacks generation"):
        codec.read(WorkerUpdate, [[], [1]])


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


def test_text_that_utf8_cannot_encode_does_not_stop_a_message() -> None:
    """The name of a file, as Python reads one of other bytes, in the traceback of a failed worker."""
    assert codec.loads(codec.dumps({"traceback": "no file caf\udce9"})) == {"traceback": "no file caf?"}
