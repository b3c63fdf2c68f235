"""Shows a slot what its training process does, even while that process is stopped or holds the GIL.

They share two anonymous files: one of numbers (since when the child waits or works, the newest sample, the driver's
last answer to the slot, whether its steps are bitwise) and the activation of its successor, one with the newest stack
of its main thread. A thread of the child writes that twice a second; if it does not get the GIL, the slot sends a
signal, upon which the main thread writes it (`faulthandler`). `faulthandler`'s watchdog, which reads stacks without the
GIL, crashed one in forty of the processes that were stopped for longer than its timeout and then continued.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from elastic_collectives import Group
from spark_elastic.clock import Clock
from spark_elastic.worker.context import WaitRecorder

SAMPLE_EVERY = 0.5  # seconds
STALE_AFTER = 1.0  # seconds after which a sample is stale if no other followed
FRAMES_AT_MOST = 10  # innermost frames that a sample shows
READ_AT_MOST = 1 << 16  # bytes
NOT_COLLECTIVE = {"rank", "size", "fence", "abort", "close", "subgroup", "set_timeout", "watch"}  # of a group
DUMP_SIGNAL = signal.SIGURG  # ignored by default: user code may reset all handlers

_NUMBER = struct.Struct("d")  # native: one copy of eight bytes, never half written
_SAMPLED = _NUMBER.size  # offset of the time of the newest sample
_DRIVER_SEEN = 2 * _NUMBER.size  # offset of the time of the driver's last answer
_BITWISE = 3 * _NUMBER.size  # offset of 1.0: its steps have the same bits, whichever workers compute them
_ACTIVATION = 4 * _NUMBER.size  # offset of a line
_DUMP_HEAD = "Stack (most recent call first):\n"
_NATIVE_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')


class _GcPause:
    """`with gc_paused:` around a few calls that do not wait. Any thread, also again inside. Prevents a deadlock of
    CPython: a collection may free an object that releases the GIL, such as a tensor. If this thread then holds an
    internal lock, another one may take the GIL and wait for that lock, while this one waits for the GIL."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # owns the fields below and whether the collector is enabled
        self._depth = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._depth:
            self._was_enabled = gc.isenabled()
        self._depth += 1
        gc.disable()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._was_enabled and not self._depth:
            gc.enable()
        self._lock.release()


gc_paused = _GcPause()  # the garbage collector is one per process


class StackSampler(WaitRecorder):
    """The child's side. Construct it in the main thread. activity, stacks: descriptors of the slot's two files."""

    def __init__(self, activity: int, stacks: int, clock: Clock) -> None:
        self._clock = clock
        self._stacks = stacks
        self._number = mmap.mmap(activity, mmap.PAGESIZE)
        self._main = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-stacks", daemon=True)
        self.set_waiting(-1)
        faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=False)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Call it when no more waits are recorded."""
        self._closing.set()
        self._thread.join()
        faulthandler.unregister(DUMP_SIGNAL)
        self._number.close()

    @contextmanager
    def record_wait(self) -> Iterator[None]:
        self.set_waiting(1)
        try:
            yield
        finally:
            self.set_waiting(-1)

    def set_waiting(self, sign: int) -> None:
        """1: it waits from now on; -1: it works."""
        _NUMBER.pack_into(self._number, 0, sign * self._clock.now())

    def set_bitwise(self) -> None:
        _NUMBER.pack_into(self._number, _BITWISE, 1.0)

    def driver_seen_at(self) -> float:
        """When the driver last answered a heartbeat, which no long poll delays; 0: never. R12 (driver silence)."""
        seen_at: float = _NUMBER.unpack_from(self._number, _DRIVER_SEEN)[0]
        return seen_at

    def watch_group(self, group: Group) -> Group:
        return cast("Group", _WatchedGroup(group, self))

    def write_activation(self, line: bytes) -> None:
        self._number[_ACTIVATION : _ACTIVATION + len(line)] = line

    def _run(self) -> None:
        while True:
            with suppress(Exception):  # a lack of memory: the slot keeps the last sample
                self._sample()
            if self._closing.wait(SAMPLE_EVERY):
                return

    def _sample(self) -> None:
        # The call creates frames while the interpreter's list of threads is locked, and each step outwards creates
        # another one while the main thread's own frame is in hand: a collection that lets that thread go on would
        # free it.
        with gc_paused:
            text = _format_stack(sys._current_frames().get(self._main)) + "\n"
        with suppress(OSError):  # the time of the sample shows that this thread runs
            os.ftruncate(self._stacks, 0)
            os.write(self._stacks, text.encode("utf-8", "replace"))
        _NUMBER.pack_into(self._number, _SAMPLED, self._clock.now())


def _format_stack(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < FRAMES_AT_MOST:
        places.append(_format_frame(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return " < ".join(places)


def _format_frame(path: str, line: str, function: str) -> str:
    return f"{function} ({'/'.join(path.split('/')[-2:])}:{line})"


class _WatchedGroup:
    def __init__(self, group: Group, sampler: StackSampler) -> None:
        self._group = group
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        """Looked up once per attribute: a group's attributes never change, and each step reads its rank and size."""
        attribute = getattr(self._group, name)
        if callable(attribute) and name not in NOT_COLLECTIVE:
            attribute = self._record(attribute)
        setattr(self, name, attribute)
        return attribute

    def bind_allreduce(self, *arguments: Any) -> Callable[[], None]:
        return self._record(self._group.bind_allreduce(*arguments))

    def _record(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        sampler = self._sampler

        def call(*arguments: Any, **named: Any) -> Any:
            sampler.set_waiting(1)
            try:
                return collective(*arguments, **named)
            finally:
                sampler.set_waiting(-1)

        return call

    def __enter__(self) -> _WatchedGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self._group.close()


@dataclass(frozen=True)
class StackSample:
    """What a training process does at one point in time."""

    is_waiting: bool  # whether it waits for other workers; otherwise it works
    seconds: float  # for how long it has waited or worked
    stack: str  # of its main thread, in one line; "" while there is none
    wants_dump: bool = False  # whether the slot must now ask the main thread for its stack
    bitwise: bool = False  # whether its steps have the same bits, whichever workers compute them


class StackReader:
    """The slot's side, which creates the files. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.activity = os.memfd_create("elastic-activity")
        self.stacks = os.memfd_create("elastic-stacks")
        os.ftruncate(self.activity, mmap.PAGESIZE)
        fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)  # samples truncate the file, dumps append to it
        self._newest = ""
        self._stale_sample = 0.0  # time of the sample that was stale at the last reading
        self._dumped_sample = 0.0  # time of the sample after which the main thread was asked for its stack
        self._closed = False

    def read(self, now: float, stopped: bool = False) -> StackSample:
        """The newest sample. now: of this machine's monotonic clock. stopped: whether the child is stopped."""
        with self._lock:
            if self._closed:
                return StackSample(is_waiting=False, seconds=0.0, stack=self._newest)
            number, sampled, bitwise = self._read_numbers()
            text = os.pread(self.stacks, READ_AT_MOST, 0).decode("utf-8", "replace")
            self._newest = parse_newest_stack(text) or self._newest
            due = self._wants_dump(sampled, now, stopped)
        seconds = max(0.0, now - abs(number)) if number else 0.0
        return StackSample(number > 0, seconds, self._newest, due, bool(bitwise))

    def read_bitwise_wait(self, now: float) -> float:
        """Seconds for which a child whose steps are bitwise has waited for others; 0.0: it works, or they are not."""
        with self._lock:
            number, _, bitwise = (0.0, 0.0, 0.0) if self._closed else self._read_numbers()
        return max(0.0, now - number) if number > 0 and bitwise else 0.0

    def _read_numbers(self) -> tuple[float, float, float]:
        page = os.pread(self.activity, _ACTIVATION, 0)
        number, sampled, bitwise = (_NUMBER.unpack_from(page, at)[0] for at in (0, _SAMPLED, _BITWISE))
        return number, sampled, bitwise

    def read_activation(self) -> bytes:
        line, end, _ = os.pread(self.activity, mmap.PAGESIZE, _ACTIVATION).partition(b"\n")
        return line if end else b""

    def record_driver_seen(self, at: float) -> None:
        """at: of this machine's monotonic clock."""
        with self._lock:
            if not self._closed:
                os.pwrite(self.activity, _NUMBER.pack(at), _DRIVER_SEEN)

    def _wants_dump(self, sampled: float, now: float, stopped: bool) -> bool:
        """Once for each sample that was stale at two readings: at the first the child may have been continued."""
        if stopped or not 0 < sampled < now - STALE_AFTER:
            self._stale_sample = 0.0
            return False
        was_stale, self._stale_sample = sampled == self._stale_sample, sampled
        if not was_stale or sampled == self._dumped_sample:
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
    """The newest stack in one line, "": none. text: a line with a sample, then what `faulthandler` has written."""
    sample, _, dumps = text.partition("\n")
    for dump in reversed(dumps.split(_DUMP_HEAD)[1:]):
        lines = dump[: dump.rfind("\n") + 1].splitlines()  # the last line may be incomplete
        places = [match.groups() for line in lines if (match := _NATIVE_FRAME.match(line))]
        if places:
            return " < ".join(_format_frame(*place) for place in places[:FRAMES_AT_MOST])
    return sample
