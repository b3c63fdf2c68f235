"""What a training process prints, in lines that a message takes: whatever it is, and however long it goes on."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

from spark_elastic.clock import Clock

LINE_AT_MOST = 1 << 18  # characters; what is longer comes in several lines
OVERWRITTEN_EVERY = 1.0  # seconds between two states of a progress bar that are shown, beside its last


def lines(pipe: IO[bytes], clock: Clock) -> Iterator[str]:
    """Until its end, when it is closed. What ends with a carriage return is written over by what follows."""
    due, cut = float("-inf"), False
    hidden = ""  # the newest state of a progress bar, if it was not shown
    with io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline="") as text:
        while raw := text.readline(LINE_AT_MOST):
            line, follows = raw.rstrip("\r\n"), cut
            cut = not raw.endswith("\n")
            if raw.endswith("\r"):
                if not line:
                    continue
                if clock.now() < due:
                    hidden = line
                    continue
                due = clock.now() + OVERWRITTEN_EVERY
            elif not line:
                line = hidden
            hidden = ""
            if line or not follows:
                yield line
        if hidden:
            yield hidden
