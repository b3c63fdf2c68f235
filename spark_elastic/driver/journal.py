"""The job's journal: all events and commands in order, for a listener and, on request, in a file.

The file has JSON lines: the machine's initial arguments, then one line for each event with the commands that it caused.
Every field is written, so `spark_elastic.testing.replay` can repeat the job. Only events that changed nothing are left
out. The driver loop is the only writer.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import typing
from collections.abc import Callable, Sequence
from io import FileIO
from typing import Any, TypeAlias

from spark_elastic.errors import InvalidInput
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.driver.state import DriverState
from spark_elastic.protocol.events import DriverEvent, Received, Tick
from spark_elastic.protocol.messages import DriverMessage
from spark_elastic.rendezvous import codec

log = logging.getLogger("spark_elastic.driver")

Commands: TypeAlias = tuple[DriverCommand, ...]
Listener: TypeAlias = Callable[[DriverEvent, Commands, DriverState | None], None]
FORMAT = 7  # of the file


class Journal:
    """The journal of one job. path: the file to append to; None: no file. listener: called with every event, its
    commands and the state that followed, even if they are not written."""

    def __init__(self, path: str | None = None, listener: Listener | None = None) -> None:
        self._path, self._listener = path, listener
        self._file: FileIO | None = None
        self._start: float | None = None
        self._state: DriverState | None = None

    def check(self) -> None:
        """Raise InvalidInput if the file cannot be opened."""
        if self._path is not None:
            _open(self._path).close()

    def begin(self, state: DriverState, commands: Commands) -> None:
        """Open the file and write the machine's initial state and first commands. Raises InvalidInput as `check`."""
        if self._path is not None:
            self._file = _open(self._path)
        self._state = state
        initial = encode_initial(state)
        self._write({"journal": FORMAT, "initial": initial, "commands": encode_commands(commands)})

    def record(self, event: DriverEvent, commands: Commands, after: DriverState | None = None) -> None:
        """Record an event with its commands. after: the machine's next state; None: the machine failed."""
        if self._start is None:
            self._start = event.now
        at = round(event.now - self._start, 6)
        before = self._state
        if self._file and (commands or after is None or before is None or not after.is_same(before)):
            self._write({"at": at, "event": encode_event(event), "commands": encode_commands(commands)})
        self._state = after
        try:
            if self._listener is not None:
                self._listener(event, commands, after)
        except Exception:  # a listener that fails must not end the job
            log.exception("the listener of the journal failed and is no longer called")
            self._listener = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line with one write, so that a killed driver can only damage the last line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:  # a full disk must not end the job
            log.warning("the journal %s ends here: %s", self._path, error)
            self.close()


def _open(path: str) -> FileIO:
    """The file, unbuffered, to append. If a killed driver left half a line, a new line is begun."""
    try:
        file = FileIO(path, "a+")
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file
    except OSError as error:
        raise InvalidInput(
            f"The journal {path} cannot be written ({error}): set journal to a file in a folder of this machine "
            "that exists, or to none."
        ) from error


def encode_event(event: DriverEvent) -> dict[str, Any]:
    """A received message is encoded as if its fields were those of the event."""
    if isinstance(event, Received):
        message = event.message
        stamp = {"now": event.now, "id": event.id}
        return {"type": type(message).__name__, **stamp, **codec.to_plain(message)}
    return {"type": type(event).__name__, **codec.to_plain(event)}


def decode_event(value: dict[str, Any]) -> DriverEvent:
    """Raises codec.MalformedMessage."""
    if value.get("type") not in MESSAGES:
        return typing.cast("DriverEvent", _decode(EVENTS, value))
    stamp = {name: value.get(name) for name in ("now", "id")}
    tick = codec.read(Tick, stamp)
    message = {name: field for name, field in value.items() if name not in stamp}
    return Received(tick.now, typing.cast("DriverMessage", _decode(MESSAGES, message)), id=tick.id)


def encode_commands(commands: Sequence[DriverCommand]) -> list[dict[str, Any]]:
    return [{"type": type(command).__name__, **codec.to_plain(command)} for command in commands]


def decode_commands(values: list[dict[str, Any]]) -> Commands:
    """Raises codec.MalformedMessage."""
    return tuple(typing.cast("DriverCommand", _decode(COMMANDS, value)) for value in values)


def encode_initial(state: DriverState) -> dict[str, Any]:
    """The arguments of `driver_machine.initial`, which a fresh state still holds under the same names."""
    return {name: codec.to_plain(getattr(state, name)) for name in INITIAL}


def decode_initial(values: dict[str, Any]) -> dict[str, Any]:
    """Those arguments again. Raises codec.MalformedMessage."""
    if set(values) != set(INITIAL):
        difference = f"the machine begins from {sorted(INITIAL)}, and the journal has {sorted(values)}"
        raise codec.MalformedMessage(difference)
    return {name: codec.read_as(hint, values[name], name) for name, hint in INITIAL.items()}


def _decode(known: dict[str, type], value: dict[str, Any]) -> object:
    fields = dict(value)
    cls = known.get(fields.pop("type", ""))
    if cls is None:
        raise codec.MalformedMessage(f"there is no {value.get('type')!r}")
    return codec.read(cls, fields)


# Derived from the type hints, so that a new event can be recorded and replayed without further code.
EVENTS = {cls.__name__: cls for cls in typing.get_args(DriverEvent) if cls is not Received}
MESSAGES = {cls.__name__: cls for cls in typing.get_args(DriverMessage)}
COMMANDS = {cls.__name__: cls for cls in typing.get_args(DriverCommand)}
INITIAL = {
    name: typing.get_type_hints(driver_machine.initial)[name]
    for name in inspect.signature(driver_machine.initial).parameters
}
