"""The one thread of a process that calls its group's collectives while the main thread computes.

Work runs in the order of submission, which the submitters must make the same on all ranks. It is handed over from any
thread; the thread itself begins with the first work. Knows neither groups nor tensors.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class EngineThread:
    """`submit` and go on, or `run` in the calling thread once nothing is under way."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # owns _thread, _last and the order of _work
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Run `work` after everything submitted before; the future has what it returns or raises."""
        done: Future[R] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spark-elastic-engine", daemon=True)
                self._thread.start()
            self._last = done
            self._work.put(lambda: _settle(done, work))
        return done

    def run(self, work: Callable[[], R]) -> R:
        """Run `work` in this thread, after everything submitted. For the main thread: nobody else submits meanwhile."""
        self.drain()
        return work()

    def drain(self) -> None:
        """Wait until everything submitted is through, whether it failed or not. The group's timeout bounds the wait."""
        with self._lock:
            last = self._last
        if last is not None:
            last.exception()

    def close(self) -> None:
        """End the thread after everything submitted; a later submit begins another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._work.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _settle(done: Future[R], work: Callable[[], R]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # raised again by the future
        done.set_exception(error)
