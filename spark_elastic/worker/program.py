"""What a worker runs: a program that can be continued in another world; its results, errors, and its process's end.

A process that user code forks has its parent's sockets, shared memory and identity, but is no worker: it ends where the
user's code ends, and a group refuses it. Any thread.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import hashlib
import json
import os
import re
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeAlias

import cloudpickle

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import ElasticError, InvalidInput, StoreError
from spark_elastic.protocol.types import Checkpoint, MembershipVersion, Position, WorldView
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES

CHANGE = "the membership changes"
LINE_AT_MOST = 2000  # characters of a line of a traceback; longer lines are cut in the middle
TRACEBACK_AT_MOST = 64 << 10  # characters of a traceback, likewise
# Files whose frames call user code: this package's, and those of `runpy` and `contextlib`.
CALLERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(function.__code__.co_filename for function in (runpy.run_path, contextlib.contextmanager)),
)
RESULT_AT_MOST = 5 << 20  # bytes of a pickled result, which a message carries as base64
ENVELOPE = 4096  # bytes that the rest of that message needs at most
AT_EXIT_TIMEOUT = 2.0  # seconds for `atexit` functions; less than `slot_agent.STOP_GRACE`


@dataclass(frozen=True)
class Stopped:
    """The program stopped at a step boundary because a planned change was announced: R6 (step summary)."""

    reason: str  # in words


@dataclass(frozen=True)
class Completed:
    """The program reached its end."""

    result: str  # JSON text for the driver


Outcome: TypeAlias = Stopped | Completed


@dataclass(frozen=True)
class WorkerHandle:
    """What a running program may use of its worker."""

    membership_version: Callable[[], MembershipVersion]  # the newest; part of each step's summary
    report_position: Callable[[Position], None]  # after each change; cheap, without I/O
    report_metrics: Callable[[Mapping[str, Any]], None]  # never blocks, and may drop numbers
    # For a program that stays in `run` from world to world: leaves this world and returns the next with its group. The
    # argument is the error that broke the world, or None at a boundary that all ranks agreed on. Raises `WorkerExit` if
    # there is no next world.
    next_world: Callable[[CollectiveError | None], tuple[WorldView, Group]]
    process_values: dict[str, Any] = field(default_factory=dict)  # by name, for all calls of a function
    report_straggler: Callable[[str], object] = lambda reason: None  # others wait for this worker
    # Tells the driver, which publishes the checkpoint unless it is too late: R18 (publication); None: the store has no
    # room for one. One short request; any thread.
    report_checkpoint: Callable[[Checkpoint | None], object] = lambda checkpoint: None
    # For a program outside of its loop, in a world with members inside of theirs: a world of this worker alone.
    go_alone: Callable[[], tuple[WorldView, Group]] | None = None
    # For a program that enters its loop: ends its time alone. Returns the world of the others with its group; None: it
    # was not alone.
    join_others: Callable[[], tuple[WorldView, Group] | None] = lambda: None


class WorkerExit(BaseException):
    """The job does not need this worker any more. Raised through user code, which must let it pass."""

    def __init__(self, code: int) -> None:
        super().__init__("this worker is to end; let this exception pass")
        self.code = code


class Program(Protocol):
    """User code made elastic. All methods are called from the worker's main thread.

    When a collective fails, the program restores the state of its position and raises the `CollectiveError`. The loop
    then joins the next world and calls `sync` and `run` again.

    A program may have an attribute `environment`: variables that are set before the slow imports, which `imports` lists
    in the form of `worker.imports`; `may_have_loop`, which is true if `run` may come to an elastic loop: R21 (outside
    of the loop); and `needs_new_process`, which is true if `run`, which has ended, is to be called again in a new
    process only.
    """

    def prepare(self) -> None:
        """Load and import everything slow. The process is warm afterwards."""
        ...

    def position(self) -> Position | None:
        """The position of the program's state; None before its first world."""
        ...

    def sync(self, world: WorldView, group: Group) -> Position | None:
        """Send or receive the state of `world.source`: into staging, verified, then swapped: R5 (staging). Returns its
        position. None: it synchronizes inside `run` and reports its position there."""
        ...

    def run(self, world: WorldView, group: Group, handle: WorkerHandle) -> Outcome:
        """Continue from `position()` to the end, or to a boundary at which all ranks stop for a planned change."""
        ...

    def close(self) -> None:
        """Free readers and threads."""
        ...


# ---- errors


def compute_fingerprint(error: BaseException) -> str:
    """A hash of type, message and the innermost frame: equal for the same defect on all hosts, so without addresses."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name}:{frames[-1].lineno}" if frames else ""
    message = re.sub(r"\b0x[0-9a-fA-F]+|\btmp\w{8}\b", "", _format_message(error))
    text = f"{type(error).__qualname__}|{message}|{where}"
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def format_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, from the user's first frame on, cut to a size that a message can carry.
    Without frames where none is the user's and the error's sentence says all: what is wrong is no line of a program."""
    trace = _skip_callers(error.__traceback__)
    if trace is None and not isinstance(error, ElasticError | FloatingPointError):
        trace = error.__traceback__
    chain = trace is not None or not isinstance(error, StoreError)  # its sentence has what the cause says
    formatted = traceback.format_exception(type(error), error, trace, chain=chain)
    if sys.version_info < (3, 11):  # which does not print them
        formatted += [f"{note}\n" for note in getattr(error, "__notes__", ())]
    lines = "".join(formatted).split("\n")
    text = _cut("\n".join(_cut(line, LINE_AT_MOST) for line in lines), TRACEBACK_AT_MOST)
    return text.encode("utf-8", "backslashreplace").decode()


def _skip_callers(trace: TracebackType | None) -> TracebackType | None:
    """The trace without the frames that call user code; None if no frame is the user's."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(CALLERS):
        frame = frame.tb_next
    return frame


def _format_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # raised by the user's class
        return ""


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ({len(text) - 2 * half} characters are left out here) {text[-half:]}"


# ---- results


def encode_result(value: object, rank: int) -> str:
    """A function's return value as JSON text, for messages that prove the job's key. rank: of the worker."""
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:  # objects may raise anything while they are pickled
        raise InvalidInput(
            f"the function on rank {rank} returned a {type(value).__name__} that cannot be pickled ({error}): "
            "return plain data."
        ) from error
    if len(pickled) > RESULT_AT_MOST:
        raise InvalidInput(
            f"the function on rank {rank} returned a {type(value).__name__} of {len(pickled) / 2**20:.1f} MiB, and "
            f"at most {RESULT_AT_MOST >> 20} MiB can be returned: write it to a file or store, and return its path."
        )
    return json.dumps(base64.b64encode(pickled).decode("ascii"))


def check_result_size(text: str) -> None:
    size = len(codec.dumps({"result": text}))
    if size > MAX_BODY_BYTES - ENVELOPE:
        raise InvalidInput(
            f"what training returned takes {size / 2**20:.1f} MiB in a message, and at most {MAX_BODY_BYTES >> 20} MiB "
            "can be sent to the driver: keep fewer numbers in the history, and write what is large to the store."
        )


def decode_result(text: str, rank: int) -> Any:
    """The value; None for `null`, which stands for a worker that ended without a result."""
    encoded = json.loads(text)
    if encoded is None:
        return None
    try:
        return cloudpickle.loads(base64.b64decode(encoded))
    except Exception as error:  # a module that is missing here, or a class whose objects cannot be unpickled
        raise InvalidInput(
            f"what the function returned on rank {rank} was pickled there and cannot be read here "
            f"({type(error).__name__}: {error}): return plain data."
        ) from error


# ---- the end of a process


def get_exit_code(error: BaseException) -> int:
    """The exit code that the interpreter would choose, after printing what the interpreter would print."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
    else:
        traceback.print_exception(error)
    return 1


def exit_process(code: int) -> NoReturn:
    """End the process after `atexit` functions, for a limited time: no other thread keeps a finished worker alive."""
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
    """Processes that the block's code forks (`os.fork`) end with the block, as they would with a script."""
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
