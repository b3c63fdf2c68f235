"""Moments without a collection of garbage. Any thread.

What it frees may let another thread go on, as the end of a tensor or a file does. Where that happens while this thread
holds a lock that Python code does not see, and the other one wants it with the interpreter in hand, both wait for ever.
"""

from __future__ import annotations

import gc
import threading


class _Uncollected:
    """`with uncollected:` for a few calls that do not wait; a signal's handler may come to it again inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # owns what follows, and whether garbage is collected
        self._depth = 0
        self._collects = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._depth:
            self._collects = gc.isenabled()
        self._depth += 1
        gc.disable()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._collects and not self._depth:
            gc.enable()
        self._lock.release()


uncollected = _Uncollected()
