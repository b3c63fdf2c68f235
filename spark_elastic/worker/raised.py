"""What a worker tells the driver of an exception, whatever its class does and however long its text is."""

from __future__ import annotations

import hashlib
import os
import runpy
import traceback
from pathlib import Path
from types import TracebackType

# Characters of a line and of a whole traceback. Longer ones are cut in the middle: beginnings and ends say most.
LINE_AT_MOST = 2000
TRACEBACK_AT_MOST = 64 << 10
CALLERS = (f"{Path(__file__).parents[1]}{os.sep}", runpy.run_path.__code__.co_filename)


def fingerprint(error: BaseException) -> str:
    """The same defect gives the same text on every host: type, message and the innermost frame's function and line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name}:{frames[-1].lineno}" if frames else ""
    told = f"{type(error).__qualname__}|{_message(error)}|{where}"
    return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def traceback_of(error: BaseException) -> str:
    """As Python prints it, in a size that a message takes and a person reads; it begins where the user's code does."""
    told = traceback.format_exception(type(error), error, _from_users_code(error.__traceback__))
    lines = "".join(told).split("\n")
    text = _cut("\n".join(_cut(line, LINE_AT_MOST) for line in lines), TRACEBACK_AT_MOST)
    return text.encode("utf-8", "backslashreplace").decode()


def _from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that called it: ours, and those that run a script. All of them where none is the user's."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(CALLERS):
        frame = frame.tb_next
    return frame or trace


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a class of the user's
        return ""


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ({len(text) - 2 * half} characters are left out here) {text[-half:]}"
