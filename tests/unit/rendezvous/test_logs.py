"""Output is handed on in order, and a reader that blocks costs lines, never the server's time."""

from __future__ import annotations

import queue
import threading

from spark_elastic.rendezvous.messages import LogLines
from spark_elastic.rendezvous.server import LogForwarder


def _lines(*lines: str) -> LogLines:
    return LogLines("1-0", "1-0.1", 0, lines)


def test_messages_come_in_order_and_close_delivers_the_rest() -> None:
    got: list[LogLines] = []
    pump = LogForwarder(got.append)
    pump.start()
    sent = [_lines(str(n)) for n in range(100)]
    for message in sent:
        pump.put(message)
    pump.close()
    assert got == sent
    pump = LogForwarder(got.append, max_pending=2)
    for text in ("a", "b", "c", "d"):
        pump.put(_lines(text))
    pump.start()
    pump.close()
    note = "[2 lines were dropped: they came faster than they were read]"
    assert got[100:] == [_lines("a"), _lines("b"), _lines(note)]


def test_a_blocked_reader_costs_lines_that_are_counted() -> None:
    got: queue.Queue[LogLines] = queue.Queue()
    taken, free = threading.Event(), threading.Event()

    def deliver(message: LogLines) -> None:
        taken.set()
        free.wait()
        got.put(message)

    pump = LogForwarder(deliver, max_pending=2)
    pump.start()
    pump.put(_lines("a"))
    assert taken.wait(10)
    for text in ("b", "c", "d", "e"):
        pump.put(_lines(text, text))
    free.set()
    assert [got.get(timeout=10).lines for _ in range(2)] == [("a",), ("b", "b")]
    pump.put(_lines("f"))
    assert got.get(timeout=10).lines == ("[6 lines were dropped: they came faster than they were read]", "f")
    pump.put(_lines("g"))
    assert got.get(timeout=10).lines == ("g",)
    pump.close()


def test_a_reader_that_raises_goes_on_reading() -> None:
    got: queue.Queue[str] = queue.Queue()

    def deliver(message: LogLines) -> None:
        got.put(message.lines[0])
        raise OSError("the terminal is gone")

    pump = LogForwarder(deliver)
    pump.start()
    pump.put(_lines("a"))
    pump.put(_lines("b"))
    assert [got.get(timeout=10), got.get(timeout=10)] == ["a", "b"]
    pump.close()
