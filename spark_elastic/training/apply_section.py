"""The apply section of a step, which nothing interrupts (R1). Main thread; elsewhere nothing interrupts anyway."""

from __future__ import annotations

import signal
import threading

# `signal.signal` wraps it, and looks for each handler among its enums: longer than the optimizer of a small net takes.
from _signal import signal as set_handler  # type: ignore[import-not-found]
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and its like wait until the block is through."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    former = set_handler(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        set_handler(signal.SIGINT, former)
        for number in held[:1]:
            signal.raise_signal(number)
