"""How a training process ends: with the code that the interpreter would give it, and with what `atexit` has."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

AT_EXIT = 2.0  # seconds that `atexit` has; less than a slot's patience


def code_of(error: BaseException) -> int:
    """The exit code, as the interpreter would have it; says what it would say."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
    else:
        traceback.print_exception(error)
    return 1


def end(code: int) -> NoReturn:
    """With what is registered with `atexit`, such as a logger's last words, but for no longer than it has time.

    Threads of user code or of a framework do not keep a finished worker alive.
    """
    late = threading.Timer(AT_EXIT, os._exit, (code,))
    late.daemon = True
    late.start()
    with contextlib.suppress(BaseException):  # told by the interpreter already
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it: no reason for another code
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def forks_end_here() -> Iterator[None]:
    """What the block's code forks (`os.fork`) ends with the block, as it would with a script: it is no worker, and must
    not speak for the one that forked it."""
    own = os.getpid()
    code = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        code = code_of(error)
    if os.getpid() != own:
        end(code)
