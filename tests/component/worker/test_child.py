"""The end of a training process whose program fails: exit code, traceback, atexit functions."""

from __future__ import annotations

import atexit
import gc
import queue
import sys
import threading

import cloudpickle

from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec, WorkerId
from spark_elastic.worker.child import Child
from spark_elastic.worker.handover import Activation


def run_child(payload: bytes) -> tuple[list[str], int]:
    """(lines, exit code) of a child without a driver."""
    lines: list[str] = []
    ends: queue.Queue[int] = queue.Queue()

    spec = SlotSpec(address="127.0.0.1:1", key=b"\0", attempt=1, driver_timeout=0.5, fork_workers=False)
    child = Child.start(
        spec,
        SlotIdentity(slot=SlotId("1-0")),
        payload,
        lambda child, line: lines.append(line),
        lambda child: child.activate(Activation(WorkerId("1-0.1"))),
        lambda child, code: ends.put(code),
    )
    code = ends.get(timeout=60.0)
    child.close()
    return lines, code


def test_an_unhandled_exception_of_a_child_gives_an_exit_code_and_a_traceback() -> None:
    lines, code = run_child(b"garbage")
    assert code == 1
    assert lines[-1].startswith("spark_elastic.errors.DriverUnreachable: The driver's rendezvous server")


class CountsAtExit:
    def prepare(self) -> None:
        atexit.register(threading.Event().wait)  # runs last and never ends
        atexit.register(lambda: sys.stdout.write(f"left alone: {gc.get_freeze_count()}\n"))


def test_atexit_functions_run_for_a_limited_time_and_objects_of_imports_are_no_garbage() -> None:
    lines, code = run_child(cloudpickle.dumps(CountsAtExit()))
    assert code == 1
    assert [int(line.removeprefix("left alone:")) > 10_000 for line in lines if "left alone" in line] == [
        True
    ]
