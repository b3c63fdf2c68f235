"""Horovod's timeline: a Chrome trace (chrome://tracing, Perfetto) of operations and of gradient buckets.

One row per name: QUEUE until the round that announces the operation, NEGOTIATE_x until all ranks have requested it,
then x itself; and one row per gradient bucket, which ranks do not negotiate. Several threads write; a lock guards the
file. The file is readable after a crash, since the format lets the closing bracket be missing. If the file cannot be
written any more, the trace ends and training continues.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spark_elastic.clock import SystemClock
from spark_elastic.config import operations_from_env
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import world
from spark_elastic.rendezvous.messages import CompareAndSet
from spark_elastic.worker.context import get_context, get_process_context

SCOPE = "timelines"  # of the driver's key-value store: which timelines the job has begun, by path
log = logging.getLogger(__name__)


class Timeline:
    def __init__(self, path: str, mark_cycles: bool = False, append: bool = False) -> None:
        """mark_cycles: mark the beginning of each round, too. append: continue the file of a former rank 0."""
        try:
            mode = "a" if append else "w"
            self._file = open(path, mode, encoding="utf-8", buffering=1)  # noqa: SIM115 - lives until close()
        except OSError as error:
            where = "name a file in a folder that rank 0 can write to"
            raise InvalidInput(f"the timeline {path!r} cannot be written: {error}; {where}.") from error
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}  # row number by name
        if self._file.tell() == 0:
            self._put("[")
            clock = SystemClock()
            zero = round((clock.wall() - clock.now()) * 1e6)  # when the timestamps of the events begin
            about = {"start_time_since_epoch_in_micros": zero}
            self._write({"name": "process_name", "ph": "M", "pid": 0, "args": about})

    def write_operation(self, label: str, kind: str, times: tuple[float, float, float, float]) -> None:
        """Write an operation. times: when it was requested and announced, began and ended, in seconds of its clock."""
        requested, announced, begin, end = times
        negotiation = f"NEGOTIATE_{kind.upper()}", announced, begin
        self._write_spans(label, ("QUEUE", requested, announced), negotiation, (kind.upper(), begin, end))

    def write_gradients(self, label: str, nbytes: int, complete: float, begin: float, end: float) -> None:
        self._write_spans(label, ("QUEUE", complete, begin), ("ALLREDUCE", begin, end), bytes=nbytes)

    def _write_spans(self, label: str, *spans: tuple[str, float, float], **details: int) -> None:
        with self._lock:
            row = self._find_row(label)
            for name, first, last in spans:
                event = {"name": name, "ph": "X", "ts": first * 1e6, "dur": max(0.0, last - first) * 1e6}
                self._write({**event, "pid": row} | ({"args": details} if details else {}))

    def mark_round(self, now: float) -> None:
        if self._mark_cycles:
            with self._lock:
                self._write({"name": "CYCLE_START", "ph": "i", "ts": now * 1e6, "pid": 0, "s": "g"})

    def close(self) -> None:
        """Complete the file; later events are dropped."""
        with self._lock:
            self._put("{}]\n", last=True)

    def _find_row(self, label: str) -> int:
        if label not in self._rows:
            row = self._rows[label] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": label}})
        return self._rows[label]

    def _write(self, event: Mapping[str, Any]) -> None:
        self._put(json.dumps(event) + ",\n")

    def _put(self, text: str, last: bool = False) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
            if last:
                self._file.close()
        except OSError as error:  # a full disk must not end the training
            log.warning("the timeline %s ends here: %s", self._file.name, error)
            with suppress(OSError):  # closing flushes the same text again
                self._file.close()


@dataclass
class _TimelineState:
    """The timeline that the user has started on every rank; rank 0 of each world has the file open."""

    path: str | None = None  # None: no timeline was started
    mark_cycles: bool = False  # the file marks the beginning of each round, too
    timeline: Timeline | None = None  # the open file
    was_stopped: bool = False  # by `stop_timeline`, in this process

    def get_open(self) -> Timeline | None:
        """Return the open file on rank 0; None where it cannot be written, since a trace is not worth a world. A worker
        that has become rank 0 continues the file."""
        if self.path is not None and self.timeline is None and world().rank == 0:
            try:
                self.timeline = Timeline(self.path, self.mark_cycles, not _record_begin(self.path))
            except InvalidInput as error:
                log.warning("%s Training continues without it.", error)
                self.path = None
        return self.timeline


def _record_begin(path: str) -> bool:
    """Whether no rank 0 of this job has begun that timeline before: a file that exists is then an older job's."""
    worker = get_context()
    if worker is None or worker.driver is None:
        return world().fence[1] <= 1
    key = hashlib.sha256(path.encode()).hexdigest()
    return worker.driver.ask(CompareAndSet(SCOPE, key, None, b"begun", uuid.uuid4().hex)).changed


def _get_state() -> _TimelineState:
    def create() -> _TimelineState:
        settings = operations_from_env()
        return _TimelineState(settings.timeline, settings.timeline_mark_cycles)

    return get_process_context().get_or_create(_TimelineState, create)


def get_timeline() -> Timeline | None:
    """Return the timeline that this rank writes; None if it writes none."""
    return _get_state().get_open()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start a Chrome trace of all operations. To be called on all ranks; rank 0 writes the file, on its host.

    A timeline that already writes to that path continues: the function may have been called again in another world.

    Raises:
        InvalidInput: another timeline is being written, or the file cannot be written.
    """
    state = _get_state()
    if state.path == file_path:
        return
    if state.path is not None:
        raise InvalidInput("a timeline is being written: stop_timeline() first.")
    if world().rank == 0:
        has_begun = not _record_begin(file_path)
        state.timeline = Timeline(file_path, mark_cycles, append=has_begun and not state.was_stopped)
    state.path, state.mark_cycles = file_path, mark_cycles


def stop_timeline() -> None:
    """Complete and close the trace."""
    state = _get_state()
    if state.timeline is not None:
        state.timeline.close()
    state.path = state.timeline = None
    state.was_stopped = True
