"""Shows a slot what its training process does, even while that process is stopped or holds the GIL: the slot's side.

They share two anonymous files: one of numbers (since when the child waits or works, the newest sample, the driver's
last answer to the slot, whether its steps are bitwise) and the activation of its successor, one with the newest stack
of its main thread. A thread of the child writes that twice a second; if it does not get the GIL, the slot sends a
signal, upon which the main thread writes it (`faulthandler`). `faulthandler`'s watchdog, which reads stacks without the
GIL, crashed one in forty of the processes that were stopped for longer than its timeout and then continued.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import signal
import struct
import threading
from dataclasses import dataclass

STALE_AFTER = 1.0  # seconds after which a sample is stale if no other followed
FRAMES_AT_MOST = 10  # innermost frames that a sample shows
READ_AT_MOST = 1 << 16  # bytes
DUMP_SIGNAL = signal.SIGURG  # ignored by default: user code may reset all handlers

NUMBER = struct.Struct("d")  # native: one copy of eight bytes, never half written
SAMPLED = NUMBER.size  # offset of the time of the newest sample
DRIVER_SEEN = 2 * NUMBER.size  # offset of the time of the driver's last answer
BITWISE = 3 * NUMBER.size  # offset of 1.0: its steps have the same bits, whichever workers compute them
ACTIVATION = 4 * NUMBER.size  # offset of a line
_DUMP_HEAD = "Stack (most recent call first):\n"
_NATIVE_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$')


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
        page = os.pread(self.activity, ACTIVATION, 0)
        number, sampled, bitwise = (NUMBER.unpack_from(page, at)[0] for at in (0, SAMPLED, BITWISE))
        return number, sampled, bitwise

    def read_activation(self) -> bytes:
        line, end, _ = os.pread(self.activity, mmap.PAGESIZE, ACTIVATION).partition(b"\n")
        return line if end else b""

    def record_driver_seen(self, at: float) -> None:
        """at: of this machine's monotonic clock."""
        with self._lock:
            if not self._closed:
                os.pwrite(self.activity, NUMBER.pack(at), DRIVER_SEEN)

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
            return " < ".join(format_frame(*place) for place in places[:FRAMES_AT_MOST])
    return sample


def format_frame(path: str, line: str, function: str) -> str:
    return f"{function} ({'/'.join(path.split('/')[-2:])}:{line})"
