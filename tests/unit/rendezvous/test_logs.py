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
    forwarder = LogForwarder(got.append)
    forwarder.start()
    sent = [_lines(str(n)) for n in range(100)]
    for message in sent:
        forwarder.put(message)
    forwarder.close()
    assert got == sent
    forwarder = LogForwarder(got.append, max_pending=2)
    for text in ("a", "b", "c", "d"):
        forwarder.put(_lines(text))
    forwarder.start()
    forwarder.close()
    note = "[2 lines were dropped: they came faster than they were read]"
    assert got[100:] == [_lines("a"), _lines("b"), _lines(note)]


def test_a_blocked_reader_costs_lines_that_are_counted() -> None:
    got: queue.Queue[LogLines] = queue.Queue()
    taken, free = threading.Event(), threading.Event()

    def deliver(message: LogLines) -> None:
        taken.set()
        free.wait()
        got.put(message)

    forwarder = LogForwarder(deliver, max_pending=2)
    forwarder.start()
    forwarder.put(_lines("a"))
    assert taken.wait(10)
    for text in ("b", "c", "d", "e"):
        forwarder.put(_lines(text, text))
    free.set()
    assert [got.get(timeout=10).lines for _ in range(2)] == [("a",), ("b", "b")]
    forwarder.put(_lines("f"))
    assert got.get(timeout=10).lines == ("[6 lines were dropped: they came faster than they were read]", "f")
    forwarder.put(_lines("g"))
    assert got.get(timeout=10).lines == ("g",)
    forwarder.close()


def test_a_reader_that_raises_goes_on_reading() -> None:
    got: queue.Queue[str] = queue.Queue()

    def deliver(message: LogLines) -> None:
        got.put(message.lines[0])
        raise OSError("the terminal is gone")

    forwarder = LogForwarder(deliver)
    forwarder.start()
    forwarder.put(_lines("a"))
    forwarder.put(_lines("b"))
    assert [got.get(timeout=10), got.get(timeout=10)] == ["a", "b"]
    forwarder.close()
