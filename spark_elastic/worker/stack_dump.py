"""What a training process is doing, kept where its slot can read it although the process is stopped or holds the GIL.

Two anonymous files that slot and child share. One holds a number: since when the child waits for others, or works. The
other holds its main thread's newest stack: a Python thread of the child writes it each second, and where that thread
no longer gets the GIL, the interpreter's C watchdog (`faulthandler`) writes in its stead. That one reads stacks without
the GIL, which may end a process that runs Python code meanwhile; it is armed anew by each sample, so that a healthy
process never lets it fire. Owned: both files. A program's own `faulthandler.dump_traceback_later` is overruled.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar, cast

from elastic_collectives import Group
from spark_elastic.clock import Clock
from spark_elastic.rendezvous.calls import Asks
from spark_elastic.rendezvous.messages import Done, Exchange, JoinWorld, Request

R = TypeVar("R")

SAMPLE_EVERY = 1.0  # seconds
WATCHDOG_AFTER = 2.0  # seconds without a sample
FRAMES = 10  # innermost ones that are told
READ_AT_MOST = 1 << 16  # bytes
KEEP_AT_MOST = 1 << 20  # bytes that repeated dumps of the watchdog may take

_NUMBER = struct.Struct("d")  # native: stored by one copy of eight bytes, never half written
_HEAD = "main thread 0x{:x}\n"
_NATIVE_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')


class Sampler:
    """The child's side. activity, stacks: the descriptors that its slot made. Construct in the main thread."""

    def __init__(self, activity: int, stacks: int, clock: Clock) -> None:
        self._clock = clock
        self._stacks = stacks
        self._number = mmap.mmap(activity, mmap.PAGESIZE)
        self._main = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-stacks", daemon=True)
        self._set(-clock.now())

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Once nothing is waited for any more."""
        self._closing.set()
        self._thread.join()
        self._number.close()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits for other processes; any thread."""
        self.begin_waiting()
        try:
            yield
        finally:
            self.end_waiting()

    def begin_waiting(self) -> None:
        self._set(self._clock.now())

    def end_waiting(self) -> None:
        self._set(-self._clock.now())

    def watched(self, group: Group) -> Group:
        """`group`, its collectives told to the slot."""
        return cast(Group, _WatchedGroup(group, self))

    def _set(self, number: float) -> None:
        _NUMBER.pack_into(self._number, 0, number)

    def _run(self) -> None:
        try:
            while True:
                faulthandler.dump_traceback_later(WATCHDOG_AFTER, repeat=True, file=self._stacks)
                self._sample()
                if self._closing.wait(SAMPLE_EVERY):
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _sample(self) -> None:
        frame = sys._current_frames().get(self._main)
        text = _HEAD.format(self._main) + _told(frame) + "\n"
        try:
            os.ftruncate(self._stacks, 0)
            os.write(self._stacks, text.encode("utf-8", "replace"))
        except OSError:
            pass  # no memory left for it: the slot keeps what it read last


def _told(frame: FrameType | None) -> str:
    """A stack in one line, innermost function first."""
    places: list[str] = []
    while frame is not None and len(places) < FRAMES:
        places.append(_place(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return " < ".join(places)


def _place(path: str, line: str, function: str) -> str:
    return f"{function} ({'/'.join(path.split('/')[-2:])}:{line})"


class WatchedAsks:
    """`asks`, with every request that waits for other workers marked as waiting."""

    _WAITING = JoinWorld, Exchange, Done

    def __init__(self, asks: Asks, sampler: Sampler) -> None:
        self._asks = asks
        self._sampler = sampler

    def ask(self, request: Request[R], hold: float = 0.0) -> R:
        with self._sampler.waiting() if isinstance(request, self._WAITING) else nullcontext():
            return self._asks.ask(request, hold)

    def now(self) -> float:
        return self._asks.now()


class _WatchedGroup:
    """A group whose every collective is marked as waiting."""

    _SILENT = frozenset({"rank", "size", "fence", "abort", "close", "subgroup"})

    def __init__(self, group: Group, sampler: Sampler) -> None:
        self._group = group
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        found, sampler = getattr(self._group, name), self._sampler
        if name in self._SILENT or not callable(found):
            return found

        def collective(*arguments: Any, **named: Any) -> Any:
            sampler.begin_waiting()
            try:
                return found(*arguments, **named)
            finally:
                sampler.end_waiting()

        setattr(self, name, collective)
        return collective

    def __enter__(self) -> _WatchedGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self._group.close()


@dataclass(frozen=True)
class Glimpse:
    """waits: the child waits for others; it has done so, or worked, for `seconds`. stack: "" while there is none."""

    waits: bool
    seconds: float
    stack: str


class Window:
    """The slot's side; makes the files. Any thread; `close` frees the descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.activity = os.memfd_create("elastic-activity")
        self.stacks = os.memfd_create("elastic-stacks")
        os.ftruncate(self.activity, mmap.PAGESIZE)
        fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)  # the sampler cuts, the watchdog appends
        self._newest = ""
        self._closed = False

    def look(self, now: float) -> Glimpse:
        """now: of the same machine's monotonic clock as the child's."""
        with self._lock:
            if self._closed:
                return Glimpse(False, 0.0, self._newest)
            (number,) = _NUMBER.unpack(os.pread(self.activity, _NUMBER.size, 0))
            size = os.fstat(self.stacks).st_size
            head, end = os.pread(self.stacks, READ_AT_MOST, 0), b""
            if size > READ_AT_MOST:
                end = os.pread(self.stacks, READ_AT_MOST, size - READ_AT_MOST)
            self._newest = newest_stack((head + end).decode("utf-8", "replace")) or self._newest
            if size > KEEP_AT_MOST:
                os.ftruncate(self.stacks, len(b"".join(head.splitlines(keepends=True)[:2])))
        return Glimpse(number > 0, max(0.0, now - abs(number)) if number else 0.0, self._newest)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.activity)
                os.close(self.stacks)


def newest_stack(text: str) -> str:
    """The main thread's newest stack in one line, "" where there is none.

    text: a line with the main thread's name, a line with the newest sample, then the watchdog's dumps, if any. Those
    begin with a line "Timeout" and hold a block per thread, as `faulthandler` documents.
    """
    name, _, rest = text.partition("\n")
    sample, *dumps = rest.split("Timeout (")
    thread = re.compile(rf"thread 0x0*{name.rpartition('0x')[2]}\b[^\n]*\n((?:  [^\n]+\n)+)", re.IGNORECASE)
    for dump in reversed(dumps):
        block = thread.search(dump)
        if block is not None:
            found = [match.groups() for line in block[1].splitlines() if (match := _NATIVE_FRAME.match(line))]
            return " < ".join(_place(*place) for place in found[:FRAMES])
    return sample.partition("\n")[0]
