"""What a training process is doing, kept where its slot can read it although the process is stopped or holds the GIL.

Two anonymous files that slot and child share. One holds numbers: since when the child waits for others, or works, when
the newest sample was taken, and, which the slot writes, when the driver last heard the slot. The other holds its main
thread's newest stack: a Python thread of the child writes it twice a second, and where that thread no longer gets the
GIL, the slot sends a signal, upon which the main thread itself writes it (`faulthandler`). Not the interpreter's
watchdog: that reads the stacks of others without the GIL, which ends the process if those run meanwhile, as in one that
was stopped for long and is continued. Owned: both files, the signal.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import mmap
import os
import re
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar, cast

from elastic_collectives import Group
from spark_elastic.clock import Clock
from spark_elastic.protocol.messages import JoinWorld, Request, WorkerDone
from spark_elastic.rendezvous.messages import DriverClient, Exchange
from spark_elastic.worker.context import WaitRecorder

# Moments without a collection of garbage. Any thread.
#
# What it frees may let another thread go on, as the end of a tensor or a file does. Where that happens while this
# thread holds a lock that Python code does not see, and the other one wants it with the interpreter in hand, both wait
# for ever.


class _GcPause:
    """`with gc_paused:` for a few calls that do not wait; a signal's handler may come to it again inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # owns what follows, and whether garbage is collected
        self._depth = 0
        self._collects = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._depth:
            self._collects = gc.isenabled()
        self._depth += 1
        gc.disable()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._collects and not self._depth:
            gc.enable()
        self._lock.release()


gc_paused = _GcPause()


R = TypeVar("R")

SAMPLE_EVERY = 0.5  # seconds
STALE_AFTER = 1.0  # seconds: a sample that no other followed
FRAMES_AT_MOST = 10  # innermost ones that are told
READ_AT_MOST = 1 << 16  # bytes
DUMP_SIGNAL = (
    signal.SIGRTMAX - 5
)  # to a child whose sample is old; it ignores the signal where it cannot answer

_NUMBER = struct.Struct("d")  # native: stored by one copy of eight bytes, never half written
_SAMPLED = _NUMBER.size  # where the second number begins
_DRIVER_SEEN = 2 * _NUMBER.size  # and the third
_DUMP_HEAD = "Stack (most recent call first):\n"
_NATIVE_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')


class StackSampler(WaitRecorder):
    """The child's side. activity, stacks: the descriptors that its slot made. Construct in the main thread."""

    def __init__(self, activity: int, stacks: int, clock: Clock) -> None:
        self._clock = clock
        self._stacks = stacks
        self._number = mmap.mmap(activity, mmap.PAGESIZE)
        self._main = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-stacks", daemon=True)
        self._set(-clock.now())
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # what holds again once faulthandler is done
        faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=False)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Once nothing is waited for any more."""
        self._closing.set()
        self._thread.join()
        faulthandler.unregister(DUMP_SIGNAL)
        self._number.close()

    @contextmanager
    def record_wait(self) -> Iterator[None]:
        """A context around anything that waits for other processes; any thread."""
        self.begin_waiting()
        try:
            yield
        finally:
            self.end_waiting()

    def begin_waiting(self) -> None:
        self._set(self._clock.now())

    def end_waiting(self) -> None:
        self._set(-self._clock.now())

    def driver_seen_at(self) -> float:
        """When the driver last heard the slot; 0 while it has not."""
        heard: float = _NUMBER.unpack_from(self._number, _DRIVER_SEEN)[0]
        return heard

    def watch_group(self, group: Group) -> Group:
        """`group`, its collectives told to the slot."""
        return cast("Group", _WatchedGroup(group, self))

    def _set(self, number: float) -> None:
        _NUMBER.pack_into(self._number, 0, number)

    def _run(self) -> None:
        while True:
            self._sample()
            if self._closing.wait(SAMPLE_EVERY):
                return

    def _sample(self) -> None:
        with gc_paused:  # it makes frames with the interpreter's list of threads locked
            frame = sys._current_frames().get(self._main)
        text = _format_stack(frame) + "\n"
        try:
            os.ftruncate(self._stacks, 0)
            os.write(self._stacks, text.encode("utf-8", "replace"))
        except OSError:
            pass  # no memory left for it: the slot keeps what it read last
        _NUMBER.pack_into(self._number, _SAMPLED, self._clock.now())


def _format_stack(frame: FrameType | None) -> str:
    """A stack in one line, innermost function first."""
    places: list[str] = []
    while frame is not None and len(places) < FRAMES_AT_MOST:
        places.append(_format_frame(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return " < ".join(places)


def _format_frame(path: str, line: str, function: str) -> str:
    return f"{function} ({'/'.join(path.split('/')[-2:])}:{line})"


class WaitRecordingClient:
    """A driver client that records requests which wait for other workers as waits.

    The slot's heartbeats, which no long poll delays, count as signs of life of the driver too (R12, driver silence).
    """

    _WAITING = JoinWorld, Exchange, WorkerDone

    def __init__(self, client: DriverClient, sampler: StackSampler) -> None:
        self._client = client
        self._sampler = sampler

    def ask(self, request: Request[R], hold: float = 0.0, within: float | None = None) -> R:
        with self._sampler.record_wait() if isinstance(request, self._WAITING) else nullcontext():
            return self._client.ask(request, hold, within)

    def now(self) -> float:
        return self._client.now()

    def last_answered_at(self) -> float:
        return max(self._client.last_answered_at(), self._sampler.driver_seen_at())


class _WatchedGroup:
    """A group whose every collective is marked as waiting."""

    _SILENT = frozenset({"rank", "size", "fence", "abort", "close", "subgroup", "limit", "watch"})

    def __init__(self, group: Group, sampler: StackSampler) -> None:
        self._group = group
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        """Asked for once: what a group has stays the same, and a step asks for its rank and size again and again."""
        found = getattr(self._group, name)
        if callable(found) and name not in self._SILENT:
            found = self._collective(found)
        setattr(self, name, found)
        return found

    def _collective(self, found: Callable[..., Any]) -> Callable[..., Any]:
        sampler = self._sampler

        def collective(*arguments: Any, **named: Any) -> Any:
            sampler.begin_waiting()
            try:
                return found(*arguments, **named)
            finally:
                sampler.end_waiting()

        return collective

    def __enter__(self) -> _WatchedGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self._group.close()


@dataclass(frozen=True)
class StackSample:
    """waits: the child waits for others; it has done so, or worked, for `seconds`. stack: "" while there is none.

    due: its main thread is to write its stack now.
    """

    is_waiting: bool
    seconds: float
    stack: str
    wants_dump: bool = False


class StackReader:
    """The slot's side; makes the files. Any thread; `close` frees the descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.activity = os.memfd_create("elastic-activity")
        self.stacks = os.memfd_create("elastic-stacks")
        os.ftruncate(self.activity, mmap.PAGESIZE)
        fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)  # samples cut, dumps append
        self._newest = ""
        self._stale_sample = 0.0  # the sample that was old when last looked at
        self._dumped_sample = 0.0  # the sample after which the main thread was asked
        self._closed = False

    def read(self, now: float, stopped: bool = False) -> StackSample:
        """now: of the same machine's monotonic clock as the child's. stopped: the child does not run now."""
        with self._lock:
            if self._closed:
                return StackSample(is_waiting=False, seconds=0.0, stack=self._newest)
            page = os.pread(self.activity, 2 * _NUMBER.size, 0)
            text = os.pread(self.stacks, READ_AT_MOST, 0).decode("utf-8", "replace")
            self._newest = parse_newest_stack(text) or self._newest
            (number,), (sampled,) = _NUMBER.unpack_from(page), _NUMBER.unpack_from(page, _SAMPLED)
            due = self._wants_dump(sampled, now, stopped)
        return StackSample(number > 0, max(0.0, now - abs(number)) if number else 0.0, self._newest, due)

    def record_driver_seen(self, at: float) -> None:
        """The driver heard the slot then."""
        with self._lock:
            if not self._closed:
                os.pwrite(self.activity, _NUMBER.pack(at), _DRIVER_SEEN)

    def _wants_dump(self, sampled: float, now: float, stopped: bool) -> bool:
        """Once for each sample that was old at two looks in a row: one that was just continued takes a new one."""
        if stopped or not 0 < sampled < now - STALE_AFTER:
            self._stale_sample = 0.0
            return False
        was_old, self._stale_sample = sampled == self._stale_sample, sampled
        if not was_old or sampled == self._dumped_sample:
            return False
        self._dumped_sample = sampled
        return True

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.activity)
                os.close(self.stacks)


def parse_newest_stack(text: str) -> str:
    """The main thread's newest stack in one line, "" where there is none.

    text: a line with the newest sample, then what the main thread wrote since upon a signal, as `faulthandler` does.
    """
    sample, _, dumps = text.partition("\n")
    for dump in reversed(dumps.split(_DUMP_HEAD)[1:]):
        whole = dump[: dump.rfind("\n") + 1].splitlines()  # the last line may be written just now
        found = [match.groups() for line in whole if (match := _NATIVE_FRAME.match(line))]
        if found:
            return " < ".join(_format_frame(*place) for place in found[:FRAMES_AT_MOST])
    return sample
