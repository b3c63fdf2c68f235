"""The apply section of a step, which nothing interrupts (R1). Main thread; elsewhere nothing interrupts anyway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and its like wait until the block is through."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        for number in held[:1]:
            signal.raise_signal(number)
