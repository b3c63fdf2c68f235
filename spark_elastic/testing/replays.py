"""Repeats a job's decisions from its journal, and turns a journal into a unit test.

Reads files that `ElasticConfig(journal=...)` wrote. Any thread.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from spark_elastic.driver.journal import FORMAT, Commands, decode_commands, decode_event, decode_initial
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.driver.state import DriverState
from spark_elastic.protocol.events import DriverEvent, Received
from spark_elastic.rendezvous.codec import MalformedMessage


class ReplayDiffers(AssertionError):
    """The machine decided otherwise than the journal says, or raised at one of its events."""


@dataclass(frozen=True)
class JournalEntry:
    """An event and the commands that it led to."""

    line: int  # of the journal
    event: DriverEvent  # what the machine was given
    commands: Commands  # what it decided


@dataclass(frozen=True)
class Replay:
    """A job that decided again as it had."""

    initial: dict[str, Any]  # arguments of `driver_machine.initial`
    first: Commands  # what the machine decided at the beginning
    entries: tuple[JournalEntry, ...]  # events and decisions, in order
    state: DriverState  # how the machine ended

    def as_test(self, name: str = "test_replayed_journal", entries: int | None = None) -> str:
        """Source of a test that takes the machine through the first `entries` of it (default: all)."""
        lines = _Source()
        table = [f"    ({lines.of(t.event)}, {lines.of(t.commands)})," for t in self.entries[:entries]]
        arguments = ", ".join(f"{key}={lines.of(value)}" for key, value in self.initial.items())
        first = lines.of(self.first)
        imports, rows = "\n".join(lines.imports()), "\n".join(table)
        return f"""# ruff: noqa: E501
from __future__ import annotations

from spark_elastic.protocol import driver_machine
{imports}

TRANSITIONS = [
{rows}
]


def {name}() -> None:
    state, commands = driver_machine.initial({arguments})
    assert commands == {first}
    for event, expected in TRANSITIONS:
        state, commands = driver_machine.step(state, event)
        assert commands == expected, event
"""


def replay(path: str | os.PathLike[str], job: int = -1) -> Replay:
    """Take the machine through a journal and compare each decision. job: which of the file's; by default the last.

    Raises:
        ReplayDiffers: at the first difference.
        InvalidInput: the file is no journal, or of a release whose events this one does not know.
    """
    jobs = list(_jobs(Path(path)))
    if not -len(jobs) <= job < len(jobs):
        count = len(jobs)
        raise InvalidInput(f"{path} has {count} jobs, and none has the number {job}: give another one.")
    return _repeat(path, *jobs[job])


def replay_all(path: str | os.PathLike[str]) -> list[Replay]:
    """The same of all jobs of the file."""
    return [_repeat(path, *job) for job in _jobs(Path(path))]


def _repeat(path: object, initial: dict[str, Any], first: Commands, entries: list[JournalEntry]) -> Replay:
    state, commands = driver_machine.initial(**initial)
    _compare(path, "the beginning", first, commands)
    for entry in entries:
        try:
            state, commands = driver_machine.step(state, entry.event)
        except Exception as error:
            subject = entry.event.message if isinstance(entry.event, Received) else entry.event
            text = f"{path}, line {entry.line}: the machine fails at {subject}: {error!r}"
            raise ReplayDiffers(text) from error
        _compare(path, f"line {entry.line}, at {entry.event}", entry.commands, commands)
    return Replay(initial, first, tuple(entries), state)


Job = tuple[dict[str, Any], Commands, list[JournalEntry]]


def _jobs(path: Path) -> Iterator[Job]:
    """The jobs of a file. A torn line is passed over where nothing of its job follows: its driver was killed."""
    job: Job | None = None
    torn = 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInput(f"The journal {path} cannot be read: {error}.") from error
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            torn = number
            continue
        try:
            if "journal" in line:
                if job is not None:
                    yield job
                job, torn = _read_header(line), 0
            elif job is None or torn:
                raise MalformedMessage(f"line {torn or number} does not belong to a job")
            else:
                event, commands = decode_event(line["event"]), decode_commands(line["commands"])
                job[2].append(JournalEntry(number, event, commands))
        except (MalformedMessage, KeyError, TypeError) as error:
            raise InvalidInput(
                f"{path} is not a journal that this release can read: line {number}: {error}. "
                "Replay it with the release that wrote it."
            ) from error
    if job is not None:
        yield job


def _read_header(line: dict[str, Any]) -> Job:
    if line["journal"] != FORMAT:
        raise MalformedMessage(f"it has format {line['journal']!r}, and this release knows {FORMAT}")
    return decode_initial(line["initial"]), decode_commands(line["commands"]), []


def _compare(path: object, where: str, recorded: Commands, now: Commands) -> None:
    for number, (old, new) in enumerate(zip(recorded, now, strict=False), start=1):
        if old != new:
            raise ReplayDiffers(f"{path}, {where}: command {number} was {old}, and now it is {new}")
    if len(recorded) != len(now):
        missing, extra = recorded[len(now) :], now[len(recorded) :]
        what = f"{extra[0]} comes in addition" if extra else f"{missing[0]} does not come"
        raise ReplayDiffers(f"{path}, {where}: {what}")


class _Source:
    """Values as Python source; fields that have their default are left out."""

    def __init__(self) -> None:
        self._used: dict[str, set[str]] = {}

    def of(self, value: Any) -> str:
        if isinstance(value, Enum):
            return f"{self._name(type(value))}.{value.name}"
        if isinstance(value, tuple):
            inner = ", ".join(self.of(item) for item in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, float) and not -1e308 < value < 1e308:
            return f'float("{value}")'
        if dataclasses.is_dataclass(value):
            fields = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
            inner = ", ".join(f"{f.name}={self.of(getattr(value, f.name))}" for f in fields)
            return f"{self._name(type(value))}({inner})"
        if isinstance(value, str) and type(value) is not str:  # an id
            return f"{self._name(type(value))}({str(value)!r})"
        return repr(value)

    def imports(self) -> list[str]:
        used = sorted(self._used.items())
        return [f"from {module} import {', '.join(sorted(names))}" for module, names in used]

    def _name(self, cls: type) -> str:
        self._used.setdefault(cls.__module__, set()).add(cls.__name__)
        return cls.__name__
