"""The driver's loop, its queue and its journal: heartbeats wait for other events, and nothing overtakes anything."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.clock import SystemClock
from spark_elastic.driver import journal as codec
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.loop import DriverLoop, EventQueue
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import DriverCommand, End, JobOutcome, LaunchSlot
from spark_elastic.protocol.events import CancelRequested, DriverEvent, LaunchEnded, Received, Tick
from spark_elastic.protocol.messages import Heartbeat, RegisterSlot
from spark_elastic.protocol.types import Checkpoint, Limits, SlotId, WorkerId

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
def test_a_heartbeat_does_not_wake_the_loop(event: Heartbeat | CancelRequested | None, woken: bool) -> None:
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


def make(
    done: list[DriverCommand], limits: Limits, journal: Journal | None = None
) -> tuple[DriverLoop, EventQueue]:
    inbox: EventQueue = EventQueue()
    initial = driver_machine.initial(limits, 1)
    return DriverLoop(initial, inbox, done.append, SystemClock(), journal or Journal()), inbox


def test_the_driver_loop_executes_the_first_commands_and_the_end() -> None:
    done: list[DriverCommand] = []
    heard: list[DriverEvent] = []
    loop, _ = make(done, Limits(2, 1, 2), Journal(listener=lambda event, *more: heard.append(event)))
    loop.start()
    loop.cancel("enough")
    end = loop.wait(5)
    loop.close()
    assert end is not None
    assert end.outcome is JobOutcome.CANCELLED
    assert [type(c) for c in done[:2]] == [LaunchSlot, LaunchSlot]
    assert any(isinstance(event, CancelRequested) and event.reason == "enough" for event in heard)


def test_ticks_are_taken_although_the_queue_is_never_empty() -> None:
    """A deadline is met although an event is always waiting."""
    done: list[DriverCommand] = []
    loop, inbox = make(done, Limits(1, 1, 1, start_timeout=0.3))
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            inbox.put(Received(time.monotonic(), Heartbeat(SlotId("9-0"))))
            time.sleep(0.0005)

    thread = threading.Thread(target=flood)
    thread.start()
    loop.start()
    end = loop.wait(10)
    stop.set()
    thread.join()
    loop.close()
    assert end is not None
    assert end.outcome is JobOutcome.NOT_ENOUGH_WORKERS


def test_an_exception_in_a_command_ends_the_job(caplog: pytest.LogCaptureFixture) -> None:
    inbox, fail = EventQueue(), Mock(side_effect=RuntimeError("no room"))
    loop = DriverLoop(driver_machine.initial(Limits(1, 1, 1), 1), inbox, fail, SystemClock(), Journal())
    loop.start()
    end = loop.wait(5)
    inbox.put(CancelRequested(0.0, "too late"))
    loop.close()
    assert isinstance(end, End)
    assert end.outcome is JobOutcome.DEFECT
    assert "no room" in end.reason
    assert "the driver loop failed" in caplog.text


# ---- the journal


NUMBERS = st.integers(0, 10**6)
st.register_type_strategy(SlotId, st.builds(SlotId.build, NUMBERS, NUMBERS))
st.register_type_strategy(WorkerId, st.builds(WorkerId.build, st.from_type(SlotId), NUMBERS))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_holds_every_field_of_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    journal.begin(*driver_machine.initial(Limits(2, 1, 3, lease=1.5), 7))
    journal.record(LaunchEnded(5.0, 3, "lost", id="e9"), ())
    journal.record(CancelRequested(7.5, "enough"), (End("enough", JobOutcome.CANCELLED),))
    journal.close()
    head, first, second = _lines(path)
    assert head["initial"]["attempt"] == 7
    assert head["initial"]["limits"]["lease"] == 1.5
    assert [command["launch"] for command in head["commands"]] == [1, 2, 3]
    assert first["event"] == {
        "type": "LaunchEnded", "now": 5.0, "id": "e9", "launch": 3, "reason": "lost",
        "cancelled": False, "executor_lost": False,
    }  # fmt: skip
    assert (first["at"], second["at"]) == (0.0, 2.5)
    assert second["commands"][0]["outcome"] == "cancelled"


def test_the_journal_holds_heartbeats_but_no_other_events_without_effect(tmp_path: Path) -> None:
    """A beat that is missing here is a worker that is lost in the replay."""
    path = tmp_path / "journal"
    journal = Journal(str(path))
    state, commands = driver_machine.initial(Limits(1, 1, 1, lease=2.0), 1)
    journal.begin(state, commands)
    events: list[DriverEvent] = [
        Received(0.0, RegisterSlot(SlotId("1-0"), "h", 1)),
        *(Tick(0.05 * n) for n in range(1, 21)),
    ]
    for event in (*events, Received(1.01, Heartbeat(SlotId("1-0"), None, "S"))):
        state, commands = driver_machine.step(state, event)
        journal.record(event, commands, state)
    journal.close()
    kinds = [line["event"]["type"] for line in _lines(path)[1:]]
    assert kinds[0] == "RegisterSlot"
    assert kinds[-1] == "Heartbeat"
    assert 5 <= kinds.count("Tick") <= 12  # of 20: those at which the leases were looked at


@pytest.mark.parametrize("name", [*codec.EVENTS, *codec.COMMANDS, *codec.MESSAGES])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_event_and_command_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    """Drawn from the type hints: a new class, or a new field, is covered on the day it is written."""
    known = {**codec.EVENTS, **codec.COMMANDS, **codec.MESSAGES}
    more = {"facts": st.dictionaries(st.text(), st.integers())} if name == "RegisterSlot" else {}
    value = data.draw(st.builds(known[name], **more))
    if name in codec.MESSAGES:
        value = Received(data.draw(st.floats()), value)
    plain = codec.encode_commands([value])[0] if name in codec.COMMANDS else codec.encode_event(value)
    plain = json.loads(json.dumps(plain))
    back = codec.decode_commands([plain])[0] if name in codec.COMMANDS else codec.decode_event(plain)
    assert repr(back) == repr(value)  # NaN differs from itself


@settings(max_examples=20, deadline=None)
@given(limits=st.from_type(Limits), attempt=st.integers(), checkpoints=st.from_type(tuple[Checkpoint, ...]))
def test_the_initial_state_is_read(limits: Limits, attempt: int, checkpoints: tuple[Checkpoint, ...]) -> None:
    state = driver_machine.DriverState(limits, attempt, checkpoints=checkpoints)
    values = json.loads(json.dumps(codec.encode_initial(state)))
    expected = {"limits": limits, "attempt": attempt, "checkpoints": checkpoints}
    assert repr(codec.decode_initial(values)) == repr(expected)


def test_a_second_job_appends_to_a_file_with_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"journal":1,"ini')
    journal = Journal(str(path))
    journal.begin(*driver_machine.initial(Limits(1, 1, 1), 2))
    journal.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"journal":1,"ini'
    assert json.loads(whole)["initial"]["attempt"] == 2


def test_a_file_that_cannot_be_opened_is_refused_and_a_full_disk_ends_the_file_and_not_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed, full = Journal(str(tmp_path / "no folder" / "journal")), Journal("/dev/full")
    with pytest.raises(InvalidInput, match=r"cannot be written .*: set journal to a file in a folder"):
        closed.begin(*driver_machine.initial(Limits(1, 1, 1), 1))
    full.begin(*driver_machine.initial(Limits(1, 1, 1), 1))
    full.record(CancelRequested(1.0, "enough"), (End("enough", JobOutcome.CANCELLED),))
    full.close()
    assert caplog.text.count("the journal /dev/full ends here") == 1
