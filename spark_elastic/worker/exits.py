"""How a training process ends, and how processes end that its user code forks.

A forked process (`os.fork`) has its parent's sockets, shared memory and identity, but is no worker: it ends where the
user's code ends, and a group refuses it (`elastic_collectives`). Any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

AT_EXIT_TIMEOUT = 2.0  # seconds for `atexit` functions; less than `slot_agent.STOP_GRACE`


def get_exit_code(error: BaseException) -> int:
    """The exit code that the interpreter would choose, after printing what the interpreter would print."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
    else:
        traceback.print_exception(error)
    return 1


def describe_exit(code: int) -> str:
    """How a process ended. code: as subprocess gives it."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def exit_process(code: int) -> NoReturn:
    """End the process after running `atexit` functions for at most `AT_EXIT_TIMEOUT`.

    Threads of user code or of a framework do not keep a finished worker alive.
    """
    late = threading.Timer(AT_EXIT_TIMEOUT, os._exit, (code,))
    late.daemon = True
    late.start()
    with contextlib.suppress(BaseException):  # the interpreter has printed it
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed or unread: no reason for another exit code
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def exit_forks() -> Iterator[None]:
    """Processes that the block's code forks (`os.fork`) end with the block, as they would with a script.

    Such a process is no worker and must not use the connections of the one that forked it.
    """
    own = os.getpid()
    code = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        code = get_exit_code(error)
    if os.getpid() != own:
        exit_process(code)


@contextlib.contextmanager
def accept_exit_zero() -> Iterator[None]:
    """`sys.exit()` and `sys.exit(0)` end the block, as they end a script with success; other codes raise."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
