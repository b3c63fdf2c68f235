"""A training process that finds no way on ends by its own word, with a traceback."""

from __future__ import annotations

import atexit
import gc
import queue
import sys
import threading

import cloudpickle

from spark_elastic.protocol.slot_spec import SlotSpec, WorkerIdentity
from spark_elastic.worker.child import Child


def life(payload: bytes) -> tuple[list[str], int]:
    """What a child without a driver writes, and its exit code."""
    lines: list[str] = []
    ends: queue.Queue[int] = queue.Queue()

    child = Child.spawn(
        SlotSpec(address="127.0.0.1:1", key=b"\0", attempt=1, collective_timeout=5.0, driver_timeout=0.5),
        WorkerIdentity("", "1-0"),
        payload,
        lambda child, line: lines.append(line),
        lambda child: child.activate("1-0.1"),
        lambda child, code: ends.put(code),
    )
    code = ends.get(timeout=60.0)
    child.close()
    return lines, code


def test_what_escapes_everything_is_an_exit_code_and_a_traceback() -> None:
    lines, code = life(b"garbage")
    assert code == 1
    assert lines[-1].startswith("spark_elastic.errors.DriverUnreachable: The driver's rendezvous server")


class SaysGoodbye:
    def prepare(self) -> None:
        atexit.register(threading.Event().wait)  # the last of them, and it never ends
        atexit.register(print, "goodbye")


def test_what_is_registered_for_its_end_runs_and_does_not_keep_it() -> None:
    lines, code = life(cloudpickle.dumps(SaysGoodbye()))
    assert code == 1
    assert "goodbye" in lines


class Loads:
    def prepare(self) -> None:
        atexit.register(lambda: sys.stdout.write(f"left alone: {gc.get_freeze_count()}\n"))


def test_the_collector_leaves_alone_what_was_loaded() -> None:
    lines, _ = life(cloudpickle.dumps(Loads()))
    assert any(int(line.removeprefix("left alone:")) > 10_000 for line in lines if "left alone" in line)
