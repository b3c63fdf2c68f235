"""What a process tells of itself through the files that it shares with its slot."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from elastic_collectives.fakes import FakeFabric, FakeGroup
from spark_elastic.clock import SystemClock
from spark_elastic.worker.stack_dump import KEEP_AT_MOST, Sampler, Window, newest_stack
from tests.unit.worker.patience import until

CLOCK = SystemClock()


@pytest.fixture
def window() -> Iterator[Window]:
    made = Window()
    yield made
    made.close()


@pytest.fixture
def sampler(window: Window) -> Iterator[Sampler]:
    made = Sampler(window.activity, window.stacks, CLOCK)
    made.start()
    yield made
    made.close()


def test_the_main_threads_stack_is_seen_innermost_first(window: Window, sampler: Sampler) -> None:
    def look_from_here() -> str:
        name = "look_from_here (worker/test_stack_dump.py:"
        return until(lambda: name in (stack := window.look(CLOCK.now()).stack) and stack) or ""

    stack = look_from_here()
    assert stack.index("look_from_here") < stack.index("test_the_main_threads_stack")


def test_collectives_count_as_waiting_and_work_does_not(window: Window, sampler: Sampler) -> None:
    fabric = FakeFabric(2)
    group = sampler.watched(fabric.group(0))
    assert not window.look(CLOCK.now()).waits
    assert (group.rank, group.size) == (0, 2)
    assert type(group.subgroup(1)) is FakeGroup  # for channels, which idle in their rounds
    partner = threading.Thread(target=lambda: late(window, fabric))
    partner.start()
    array = np.ones(2)
    group.allreduce(array)
    partner.join()
    assert array.tolist() == [2.0, 2.0]
    seen = window.look(CLOCK.now() + 5.0)
    assert not seen.waits
    assert seen.seconds >= 5.0


def late(window: Window, fabric: FakeFabric) -> None:
    """Comes only once the other is seen to wait."""
    until(lambda: window.look(CLOCK.now()).waits)
    fabric.group(1).allreduce(np.ones(2))


def test_a_watchdogs_dump_is_newer_than_the_sample() -> None:
    dump = (
        "Timeout (0:00:02)!\n"
        'Thread 0x00007fab (most recent call first):\n  File "/x/other.py", line 3 in other\n\n'
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/x/y/inner.py", line 5 in inner\n  File "/x/y/outer.py", line 7 in <module>\n'
    )
    text = "main thread 0x7f01\nsampled (a/b.py:1)\n" + dump.replace("line 5", "line 4") + dump
    assert newest_stack(text) == "inner (y/inner.py:5) < <module> (y/outer.py:7)"
    # Half written: the one before it counts.
    half = "Timeout (0:00:02)!\nThread 0x00007fab (most recent call first):\n"
    assert newest_stack(text + half).startswith("inner (y/inner.py:5)")
    assert newest_stack("main thread 0x7f01\nsampled (a/b.py:1)\n" + half) == "sampled (a/b.py:1)"
    assert newest_stack("") == ""


def test_dumps_of_an_hour_do_not_pile_up(window: Window) -> None:
    os.write(window.stacks, b"main thread 0x1\nsampled (a.py:1)\n" + b"x" * (KEEP_AT_MOST + 1))
    assert window.look(0.0).stack == "sampled (a.py:1)"
    assert os.fstat(window.stacks).st_size < 100
    os.write(window.stacks, b'Timeout (1)\nThread 0x01 (x):\n  File "b.py", line 2 in f\n')
    assert window.look(0.0).stack == "f (b.py:2)"


def test_a_closed_window_still_tells_what_it_saw_last() -> None:
    window = Window()
    os.write(window.stacks, b"main thread 0x1\nsampled (a.py:1)\n")
    window.look(0.0)
    window.close()
    window.close()
    assert window.look(0.0).stack == "sampled (a.py:1)"
