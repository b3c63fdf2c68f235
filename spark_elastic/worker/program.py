"""What a worker runs, seen from its loop: a program that can be interrupted and carried on in another world."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import runpy
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import cloudpickle

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Checkpoint, Position, World
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES

CHANGE = "the membership changes"


@dataclass(frozen=True)
class Stopped:
    """The program stopped at a boundary because a planned change was announced (R6)."""

    reason: str


@dataclass(frozen=True)
class Completed:
    """The program reached its end; `result` is JSON text for the driver."""

    result: str


Outcome: TypeAlias = Stopped | Completed


@dataclass(frozen=True)
class WorkerHandle:
    """What a running program may use of its worker.

    membership_version: newest version of the membership that this worker heard of; goes into the trailer.
    tell: called with the position after each change of it; cheap, no I/O.
    report: ships a few numbers to the driver for the progress line; may drop some, never blocks.
    next_world: for a program that keeps control over worlds: leaves this one (None: at a boundary that all ranks agreed
    on; an error: because it broke) and returns the next and its group. Raises `WorkerExit` when there is none.
    kept: what outlives one call of a user's function, by name.
    wrote_checkpoint: tells the driver, which decides whether it counts (R18); any thread, one short request.
    """

    membership_version: Callable[[], int]
    report_position: Callable[[Position], None]
    report_metrics: Callable[[Mapping[str, Any]], None]
    next_world: Callable[[CollectiveError | None], tuple[World, Group]]
    persistent: dict[str, Any] = field(default_factory=dict)
    report_checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None


class WorkerExit(BaseException):
    """The job has no more use for this worker. Raised through user code, which must let it pass."""

    def __init__(self, code: int) -> None:
        super().__init__("this worker is to end; let this exception pass")
        self.code = code


class Program(Protocol):
    """User code made elastic. All methods are called from the worker's main thread.

    A broken exchange is raised as `elastic_collectives.CollectiveError` after the program has put itself back to its
    position: the loop then joins the next world and calls `sync` and `run` again.

    A program may have an attribute `environment`: variables that its process gets before anything slow is imported.
    """

    def prepare(self) -> None:
        """Load and import whatever takes long, before the worker is called warm."""
        ...

    def position(self) -> Position | None:
        """Where the program's state stands; None before it took part in any world."""
        ...

    def sync(self, world: World, group: Group) -> Position | None:
        """R5: hand over or take the state of `world.source`, into staging, verified, then swapped.

        Returns the position of the state that it then holds; None: the program hands its state on in `run`, and tells
        it there.
        """
        ...

    def run(self, world: World, group: Group, handle: WorkerHandle) -> Outcome:
        """Go on from `position()` until the end, or until a boundary at which a change is wanted."""
        ...

    def close(self) -> None:
        """Free readers and threads."""
        ...


def get_environment(program: object) -> Mapping[str, str]:
    """The variables that it wants, if any."""
    found: Mapping[str, str] = getattr(program, "environment", {})
    return found


# What a worker tells the driver of an exception, whatever its class does and however long its text is.


# Characters of a line and of a whole traceback. Longer ones are cut in the middle: beginnings and ends say most.
LINE_AT_MOST = 2000
TRACEBACK_AT_MOST = 64 << 10
CALLERS = (f"{Path(__file__).parents[1]}{os.sep}", runpy.run_path.__code__.co_filename)


def compute_fingerprint(error: BaseException) -> str:
    """The same defect gives the same text on every host: type, message and the innermost frame's function and line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name}:{frames[-1].lineno}" if frames else ""
    told = f"{type(error).__qualname__}|{_message(error)}|{where}"
    return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def format_traceback(error: BaseException) -> str:
    """As Python prints it, in a size that a message takes and a person reads; it begins where the user's code does."""
    told = traceback.format_exception(type(error), error, _skip_callers(error.__traceback__))
    lines = "".join(told).split("\n")
    text = _cut("\n".join(_cut(line, LINE_AT_MOST) for line in lines), TRACEBACK_AT_MOST)
    return text.encode("utf-8", "backslashreplace").decode()


def _skip_callers(trace: TracebackType | None) -> TracebackType | None:
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


# What a function returned, on its way from a worker to the caller: any object that cloudpickle takes.
#
# The text travels in messages that prove the job's key; nothing else is ever decoded.


ENVELOPE = 4096  # bytes that a message may need besides the result, generously
RESULT_AT_MOST = (
    5 << 20
)  # bytes of a pickled result: it travels in one message, as text that is a third longer


def encode_result(value: object, rank: int) -> str:
    """JSON text. rank: whose result it is, for the error.

    Raises:
        InvalidInput: the value cannot be pickled, or is too large.
    """
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:  # objects raise anything when they are asked for their state
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
    """For a program's result, as JSON text.

    Raises:
        InvalidInput: it is too large.
    """
    size = len(codec.dumps({"result": text}))
    if size > MAX_BODY_BYTES - ENVELOPE:
        raise InvalidInput(
            f"what training returned takes {size / 2**20:.1f} MiB in a message, and at most {MAX_BODY_BYTES >> 20} MiB "
            "can be sent to the driver: keep fewer numbers in the history, and write what is large to the store."
        )


def decode_result(text: str, rank: int) -> Any:
    """The value; None for `null`, which stands for a worker that ended without a result. rank: as in `encode`.

    Raises:
        InvalidInput: the value cannot be made here again.
    """
    encoded = json.loads(text)
    if encoded is None:
        return None
    try:
        return cloudpickle.loads(base64.b64decode(encoded))
    except (
        Exception
    ) as error:  # a module that is not here, or a class whose objects pickle and do not come back
        raise InvalidInput(
            f"what the function returned on rank {rank} was pickled there and cannot be read here "
            f"({type(error).__name__}: {error}): return plain data."
        ) from error
