"""Shows a slot what this training process does: the child's side of the files that `stack_reader` describes."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, cast

from elastic_collectives import Group
from spark_elastic.clock import Clock
from spark_elastic.worker.context import WaitRecorder
from spark_elastic.worker.stack_reader import (
    ACTIVATION,
    BITWISE,
    DRIVER_SEEN,
    DUMP_SIGNAL,
    FRAMES_AT_MOST,
    NUMBER,
    SAMPLED,
    format_frame,
)

SAMPLE_EVERY = 0.5  # seconds
NOT_COLLECTIVE = {"rank", "size", "fence", "abort", "close", "subgroup", "set_timeout", "watch"}  # of a group


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
        NUMBER.pack_into(self._number, 0, sign * self._clock.now())

    def set_bitwise(self) -> None:
        NUMBER.pack_into(self._number, BITWISE, 1.0)

    def driver_seen_at(self) -> float:
        """When the driver last answered a heartbeat, which no long poll delays; 0: never. R12 (driver silence)."""
        seen_at: float = NUMBER.unpack_from(self._number, DRIVER_SEEN)[0]
        return seen_at

    def watch_group(self, group: Group) -> Group:
        return cast("Group", _WatchedGroup(group, self))

    def write_activation(self, line: bytes) -> None:
        self._number[ACTIVATION : ACTIVATION + len(line)] = line

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
        NUMBER.pack_into(self._number, SAMPLED, self._clock.now())


def _format_stack(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < FRAMES_AT_MOST:
        places.append(format_frame(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return " < ".join(places)


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
