"""Where in Python a process crashed in native code, read from what `faulthandler` prints among the process's lines.

One thread hears the lines; any other may ask.
"""

from __future__ import annotations

import re
import threading

DEEPEST = 3  # frames
FRAME = re.compile(r'  File "(?:.*/)?(.*)", line (\d+) in (.*)')


class CrashSite:
    """The innermost frames of the thread that crashed; the same on all hosts, whatever folders their files are in."""

    def __init__(self) -> None:
        self._frames: list[str] | None = None  # None: it has not crashed
        self._here = False  # the frames of the thread that crashed follow
        self._known = threading.Event()

    def hear(self, line: str) -> None:
        if line.startswith("Fatal Python error: "):
            self._frames = []
        elif self._frames is not None and line.startswith("Current thread "):
            self._here = True
        elif self._frames is not None and self._here:
            frame = FRAME.fullmatch(line)
            if frame is not None:
                self._frames.append("{}, line {}, in {}".format(*frame.groups()))
            if frame is None or len(self._frames) == DEEPEST:
                self._here = False
                self._known.set()

    def no_more(self) -> None:
        """The process has no more lines."""
        self._known.set()

    def place(self, within: float) -> str:
        """The frames, "" if it did not say. Waits for them for so many seconds."""
        self._known.wait(within)
        return "; called from ".join(self._frames or ())
