"""The job's story: every event and command in order, kept in memory (bounded) and, where asked, in a file.

One writer, the driver loop; readers take copies.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from enum import Enum
from typing import IO, Any

from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.events import DriverEvent, SlotBeat, Tick

KEPT = 10_000  # entries in memory; a week of ticks and beats is not worth keeping, so these are left out


class Journal:
    """Entries are (seconds since the start, kind, value)."""

    def __init__(self, path: str | None = None) -> None:
        self._entries: deque[tuple[float, str, Any]] = deque(maxlen=KEPT)
        self._file: IO[str] | None = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115 - closed in close()
        self._start: float | None = None

    def record(self, event: DriverEvent, commands: tuple[DriverCommand, ...]) -> None:
        """Note an event and what the machine made of it. Uneventful ticks and beats are left out."""
        if self._start is None:
            self._start = event.now
        if isinstance(event, Tick | SlotBeat) and not commands:
            return
        at = event.now - self._start
        self._keep(at, "event", event)
        for command in commands:
            self._keep(at, "command", command)
        if self._file is not None:
            self._file.flush()

    def story(self) -> list[str]:
        """One readable line per entry."""
        return [
            f"{at:9.3f} {kind:7} {type(value).__name__} {_fields(value)}"
            for at, kind, value in list(self._entries)
        ]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, at: float, kind: str, value: Any) -> None:
        self._entries.append((at, kind, value))
        if self._file is not None:
            line = {"at": round(at, 6), "kind": kind, "type": type(value).__name__, "value": _plain(value)}
            self._file.write(json.dumps(line) + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _fields(value: Any) -> str:
    shown = (
        (f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in ("now", "reason")
    )
    text = " ".join(f"{name}={_short(item)}" for name, item in shown if item not in (None, "", ()))
    reason = getattr(value, "reason", "")
    return f"{text} ({reason})" if reason else text


def _short(item: Any) -> str:
    text = str(_plain(item))
    return text if len(text) <= 200 else text[:200] + "…"
