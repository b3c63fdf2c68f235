"""Tries whether this host can load a pickled object, in a process of its own that is forked as a worker is.

So the slow imports are not made in this process, and its fork server is ready once a slot starts here.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from dataclasses import dataclass

import cloudpickle

from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec
from spark_elastic.worker.child import Child
from spark_elastic.worker.exits import describe_exit

LOAD_SECONDS = 300.0  # for the imports and for loading
FAILED = "spark_elastic cannot load: "  # what the process prints before the error


@dataclass(frozen=True)
class LoadingProgram:
    """Takes the place of a worker's program. Its preparation loads the object, or ends the process."""

    payload: bytes  # cloudpickle of the object

    def prepare(self) -> None:
        error = find_load_error(self.payload)
        if error is not None:
            sys.stdout.write(f"{FAILED}{' '.join(error.split())}\n")
            sys.stdout.flush()
            os._exit(1)


def find_load_error(payload: bytes) -> str | None:
    """Load the object in this process. Returns the error, or None."""
    try:
        cloudpickle.loads(payload)
    except Exception as error:  # whatever user classes raise while they are unpickled
        return f"{type(error).__name__}: {error}"
    return None


def find_load_error_in_fork(payload: bytes, spec: SlotSpec) -> str | None:
    """Load the object in a process that this one's fork server forks. Main thread only; blocks for its imports.

    Args:
        spec: of the slots to come.

    Raises:
        TimeoutError: it was still loading after `LOAD_SECONDS`.
    """
    lines: list[str] = []
    codes: list[int] = []  # the exit code, if it ended before it was warm
    ready = threading.Event()

    def record_exit(child: Child, code: int) -> None:
        codes.append(code)
        ready.set()

    child = Child.start(
        spec,
        SlotIdentity(slot=SlotId.build(0, 0)),
        pickle.dumps(LoadingProgram(payload)),
        lambda child, line: lines.append(line),
        lambda child: ready.set(),
        record_exit,
    )
    in_time = ready.wait(LOAD_SECONDS)
    ended = list(codes)  # before it is killed
    child.close()  # its last lines are here afterwards
    if not in_time:
        raise TimeoutError
    if not ended:
        return None
    said = (line.removeprefix(FAILED) for line in reversed(lines) if line.startswith(FAILED))
    return next(said, f"the process that loads it ended: {describe_exit(ended[0])}")
