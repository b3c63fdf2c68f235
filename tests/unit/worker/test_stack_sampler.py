"""What a process tells of itself through the files that it shares with its slot."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from elastic_collectives.fakes import FakeFabric, FakeGroup
from spark_elastic.clock import SystemClock
from spark_elastic.rendezvous.messages import DriverClient
from spark_elastic.worker.stack_sampler import (
    DUMP_SIGNAL,
    StackReader,
    StackSampler,
    WaitRecordingClient,
    parse_newest_stack,
)
from tests.patience import until

CLOCK = SystemClock()


@pytest.fixture
def window() -> Iterator[StackReader]:
    made = StackReader()
    yield made
    made.close()


@pytest.fixture
def sampler(window: StackReader) -> Iterator[StackSampler]:
    made = StackSampler(window.activity, window.stacks, CLOCK)
    made.start()
    yield made
    made.close()


def test_the_main_threads_stack_is_seen_innermost_first(window: StackReader, sampler: StackSampler) -> None:
    def look_from_here() -> str:
        name = "look_from_here (worker/test_stack_sampler.py:"
        return until(lambda: name in (stack := window.read(CLOCK.now()).stack) and stack) or ""

    stack = look_from_here()
    assert stack.index("look_from_here") < stack.index("test_the_main_threads_stack")


def test_collectives_count_as_waiting_and_work_does_not(window: StackReader, sampler: StackSampler) -> None:
    fabric = FakeFabric(2)
    group = sampler.watch_group(fabric.group(0))
    assert not window.read(CLOCK.now()).is_waiting
    assert (group.rank, group.size) == (0, 2)
    assert type(group.subgroup(1)) is FakeGroup  # for channels, which idle in their rounds
    partner = threading.Thread(target=lambda: late(window, fabric))
    partner.start()
    array = np.ones(2)
    group.allreduce(array)
    partner.join()
    assert array.tolist() == [2.0, 2.0]
    seen = window.read(CLOCK.now() + 5.0)
    assert not seen.is_waiting
    assert seen.seconds >= 5.0


def late(window: StackReader, fabric: FakeFabric) -> None:
    """Comes only once the other is seen to wait."""
    until(lambda: window.read(CLOCK.now()).is_waiting)
    fabric.group(1).allreduce(np.ones(2))


def test_r12_when_the_driver_heard_the_slot_counts_for_its_worker(
    window: StackReader, sampler: StackSampler
) -> None:
    client = SimpleNamespace(last_answered_at=lambda: 5.0)
    worker = WaitRecordingClient(cast("DriverClient", client), sampler)
    assert worker.last_answered_at() == 5.0
    window.record_driver_seen(7.0)
    assert worker.last_answered_at() == 7.0
    window.record_driver_seen(4.0)
    assert worker.last_answered_at() == 5.0
    window.close()
    window.record_driver_seen(9.0)  # a beat's answer that comes late


def test_a_dump_is_newer_than_the_sample() -> None:
    head = "Stack (most recent call first):\n"
    dump = f'{head}  File "/x/y/inner.py", line 5 in inner\n  File "/x/y/outer.py", line 7 in <module>\n'
    text = "sampled (a/b.py:1)\n" + dump.replace("line 5", "line 4") + dump
    assert parse_newest_stack(text) == "inner (y/inner.py:5) < <module> (y/outer.py:7)"
    # Half written: the one before it counts.
    half = f'{head}  File "/x/z/inner.py", lin'
    assert parse_newest_stack(text + half).startswith("inner (y/inner.py:5)")
    assert parse_newest_stack("sampled (a/b.py:1)\n" + half) == "sampled (a/b.py:1)"
    assert parse_newest_stack("") == ""


def test_the_main_thread_tells_its_stack_upon_the_signal(window: StackReader) -> None:
    sampler = StackSampler(window.activity, window.stacks, CLOCK)
    os.write(window.stacks, b"sampled (a.py:1)\n")
    os.kill(os.getpid(), DUMP_SIGNAL)
    assert "test_the_main_thread_tells" in window.read(CLOCK.now()).stack
    sampler.start()
    assert until(lambda: sampled(window))
    sampler.close()
    os.kill(os.getpid(), DUMP_SIGNAL)  # one that comes late ends nothing


def sampled(window: StackReader) -> float:
    number: float = struct.unpack("dd", os.pread(window.activity, 16, 0))[1]
    return number


def test_who_runs_and_takes_no_sample_is_asked_once_but_not_one_that_was_just_continued(
    window: StackReader,
) -> None:
    def due(now: float, stopped: bool = False) -> bool:
        return window.read(now, stopped).wants_dump

    assert not due(50.0)
    assert not due(60.0), "it has not begun"
    os.pwrite(window.activity, struct.pack("dd", 1.0, 100.0), 0)
    assert not due(100.5)
    assert not due(110.0, stopped=True)
    assert not due(111.0), "it may have been continued just now"
    os.pwrite(window.activity, struct.pack("dd", 1.0, 111.1), 0)
    assert not due(112.0)
    assert not due(113.0)
    assert due(114.0)
    assert not due(115.0), "it was asked"
    os.pwrite(window.activity, struct.pack("dd", 1.0, 115.5), 0)
    assert [due(117.0), due(118.0), due(119.0)] == [False, True, False]


def test_a_closed_window_still_tells_what_it_saw_last() -> None:
    window = StackReader()
    os.write(window.stacks, b"sampled (a.py:1)\n")
    window.read(0.0)
    window.close()
    window.close()
    assert window.read(0.0).stack == "sampled (a.py:1)"


STARTS_THREADS = """
import gc, threading, time
from spark_elastic.clock import SystemClock
from spark_elastic.worker.stack_sampler import StackReader, StackSampler

class LetsOthersGoOn:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)

window = StackReader()
sampler = StackSampler(window.activity, window.stacks, SystemClock())
gc.set_threshold(5)

def sample():
    for _ in range(500):
        LetsOthersGoOn()
        sampler._sample()

sampling = threading.Thread(target=sample)
sampling.start()
while sampling.is_alive():
    starting = threading.Thread(target=int)
    starting.start()
    starting.join()
print("through")
"""


def test_a_sample_collects_no_garbage_while_it_locks_the_interpreters_threads() -> None:
    """A thread that is let go on by a collection there, and starts another, would stop the whole process."""
    run = subprocess.run(
        [sys.executable, "-c", STARTS_THREADS], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "through\n"
