"""What a slot reads of its training process, and pauses of the garbage collector."""

from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.worker.stack_reader import DUMP_SIGNAL, StackReader, parse_newest_stack
from spark_elastic.worker.stack_sampler import StackSampler, gc_paused
from tests.fake_group import FakeFabric, FakeGroup
from tests.patience import until

CLOCK = SystemClock()


@pytest.fixture
def reader() -> Iterator[StackReader]:
    reader = StackReader()
    yield reader
    reader.close()


@pytest.fixture
def sampler(reader: StackReader) -> Iterator[StackSampler]:
    made = StackSampler(reader.activity, reader.stacks, CLOCK)
    made.start()
    yield made
    made.close()


def test_a_sample_has_the_stack_innermost_frame_first(reader: StackReader, sampler: StackSampler) -> None:
    def wait_for_sample() -> str:
        name = "wait_for_sample (worker/test_stack_sampler.py:"
        return until(lambda: name in (stack := reader.read(CLOCK.now()).stack) and stack) or ""

    stack = wait_for_sample()
    assert stack.index("wait_for_sample") < stack.index("test_a_sample_has_the_stack")


@pytest.mark.parametrize("bound", [False, True])
def test_a_worker_waits_in_collectives_and_works_otherwise(
    reader: StackReader, sampler: StackSampler, bound: bool
) -> None:
    fabric = FakeFabric(2)
    group = sampler.watch_group(fabric.group(0))
    assert not reader.read(CLOCK.now()).is_waiting
    assert (group.rank, group.size) == (0, 2)
    assert type(group.subgroup(1)) is FakeGroup  # for operation queues, which idle in collectives

    def join_late() -> None:
        """Join the collective only after the other rank is seen to wait."""
        until(lambda: reader.read(CLOCK.now()).is_waiting)
        fabric.group(1).allreduce(np.ones(2))

    partner = threading.Thread(target=join_late)
    partner.start()
    array = np.ones(2)
    if bound:
        sum_array = group.bind_allreduce(array)
        assert not reader.read(CLOCK.now()).is_waiting
        sum_array()
    else:
        group.allreduce(array)
    partner.join()
    assert array.tolist() == [2.0, 2.0]
    sample = reader.read(CLOCK.now() + 5.0)
    assert not sample.is_waiting
    assert sample.seconds >= 5.0


def test_r12_a_worker_sees_answers_to_its_slot(reader: StackReader, sampler: StackSampler) -> None:
    reader.record_driver_seen(5.0)
    assert sampler.driver_seen_at() == 5.0
    reader.close()
    reader.record_driver_seen(9.0)  # a late answer to a heartbeat


def test_a_complete_dump_is_preferred_to_the_sample() -> None:
    head = "Stack (most recent call first):\n"
    dump = f'{head}  File "/x/y/inner.py", line 5 in inner\n  File "/x/y/outer.py", line 7 in <module>\n'
    text = "sampled (a/b.py:1)\n" + dump.replace("line 5", "line 4") + dump
    assert parse_newest_stack(text) == "inner (y/inner.py:5) < <module> (y/outer.py:7)"
    # An incomplete dump: the one before it counts.
    half = f'{head}  File "/x/z/inner.py", lin'
    assert parse_newest_stack(text + half).startswith("inner (y/inner.py:5)")
    assert parse_newest_stack("sampled (a/b.py:1)\n" + half) == "sampled (a/b.py:1)"
    assert parse_newest_stack("") == ""


def test_the_main_thread_writes_its_stack_upon_the_signal(reader: StackReader) -> None:
    sampler = StackSampler(reader.activity, reader.stacks, CLOCK)
    os.write(reader.stacks, b"sampled (a.py:1)\n")
    os.kill(os.getpid(), DUMP_SIGNAL)
    assert "test_the_main_thread_writes" in reader.read(CLOCK.now()).stack
    sampler.start()
    assert until(lambda: read_sample_time(reader))
    before = signal.signal(DUMP_SIGNAL, signal.SIG_DFL)  # as user code does that resets all handlers
    os.kill(os.getpid(), DUMP_SIGNAL)
    signal.signal(DUMP_SIGNAL, before or signal.SIG_DFL)
    sampler.close()
    os.kill(os.getpid(), DUMP_SIGNAL)  # a late signal does not end the process


def read_sample_time(reader: StackReader) -> float:
    number: float = struct.unpack("dd", os.pread(reader.activity, 16, 0))[1]
    return number


def test_a_running_process_with_a_stale_sample_is_asked_once_for_a_dump(reader: StackReader) -> None:
    def wants_dump(now: float, stopped: bool = False) -> bool:
        return reader.read(now, stopped).wants_dump

    assert not wants_dump(50.0)
    assert not wants_dump(60.0), "sampling has not started"
    os.pwrite(reader.activity, struct.pack("dd", 1.0, 100.0), 0)
    assert not wants_dump(100.5)
    assert not wants_dump(110.0, stopped=True)
    assert not wants_dump(111.0), "it may just have been continued"
    os.pwrite(reader.activity, struct.pack("dd", 1.0, 111.1), 0)
    assert not wants_dump(112.0)
    assert not wants_dump(113.0)
    assert wants_dump(114.0)
    assert not wants_dump(115.0), "it was asked already"
    os.pwrite(reader.activity, struct.pack("dd", 1.0, 115.5), 0)
    assert [wants_dump(117.0), wants_dump(118.0), wants_dump(119.0)] == [False, True, False]


STARTS_THREADS = """
import gc, threading, time
from spark_elastic.clock import SystemClock
from spark_elastic.worker.stack_reader import StackReader
from spark_elastic.worker.stack_sampler import StackSampler

class ReleasesTheGil:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)

reader = StackReader()
sampler = StackSampler(reader.activity, reader.stacks, SystemClock())
gc.set_threshold(5)

def sample():
    for _ in range(500):
        ReleasesTheGil()
        sampler._sample()

sampling = threading.Thread(target=sample)
sampling.start()
while sampling.is_alive():
    starting = threading.Thread(target=int)
    starting.start()
    starting.join()
print("through")
"""


def test_no_garbage_is_collected_while_a_sample_locks_the_interpreters_threads() -> None:
    """Otherwise a thread that runs during that collection and starts another thread would block the whole process."""
    run = subprocess.run(
        [sys.executable, "-c", STARTS_THREADS], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "through\n"


@pytest.fixture(autouse=True)
def enabled_collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_pauses_of_the_collector_nest_and_exclude_those_of_other_threads() -> None:
    def pause_and_look(_: int) -> bool:
        with gc_paused, gc_paused:
            return not gc.isenabled()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(pause_and_look, range(2000)))
    with gc_paused:
        assert pause_and_look(1)
        assert not gc.isenabled()
    with pytest.raises(KeyError), gc_paused:
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    assert pause_and_look(1)
    assert not gc.isenabled(), "a collector that was disabled stays so"
