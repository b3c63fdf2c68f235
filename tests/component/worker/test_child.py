"""A training process that finds no way on ends by its own word, with a traceback."""

from __future__ import annotations

import os
import queue

from spark_elastic.worker.child import Child
from spark_elastic.worker.entry import Header


def test_what_escapes_everything_is_an_exit_code_and_a_traceback() -> None:
    lines: list[str] = []
    ends: queue.Queue[int] = queue.Queue()

    def header(status: int) -> Header:
        nobody = "127.0.0.1:1"
        return Header(os.getpid(), nobody, "00", 1, "1-0", "127.0.0.1", None, (), 5.0, 0.5, 7, status)

    child = Child.spawn(
        header,
        b"garbage",
        lambda child, line: lines.append(line),
        lambda child: child.activate("1-0.1"),
        lambda child, code: ends.put(code),
    )
    assert ends.get(timeout=60.0) == 1
    child.close()
    assert lines[-1].startswith("spark_elastic.errors.DriverUnreachable: The driver's rendezvous server")
