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

from spark_elastic.protocol.slot_spec import SlotIdentity, SlotSpec
from spark_elastic.protocol.types import SlotId
from spark_elastic.worker.child import Child

LOAD_SECONDS = 300.0  # for the imports and for loading
FAILED = "spark_elastic cannot load: "  # what the process prints before the error


@dataclass(frozen=True)
class LoadingProgram:
    """Takes the place of a worker's program. Its preparation loads the object, or ends the process."""

    payload: bytes

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


def find_load_error_in_fork(payload: bytes, imports: tuple[str, ...], threads: int | None) -> str | None:
    """Load the object in a process that this one's fork server forks. Main thread only; blocks for its imports.

    Args:
        imports, threads: `SlotSpec.imports` and `SlotSpec.cpus_per_worker` of the slots to come.
    """
    lines: list[str] = []
    codes: list[int] = []
    ended = threading.Event()

    def record_exit(child: Child, code: int) -> None:
        codes.append(code)
        ended.set()

    spec = SlotSpec(address="", key=b"", attempt=0, imports=imports, cpus_per_worker=threads)
    child = Child.spawn(
        spec,
        SlotIdentity(slot=SlotId.build(0, 0)),
        pickle.dumps(LoadingProgram(payload)),
        lambda child, line: lines.append(line),
        lambda child: ended.set(),
        record_exit,
    )
    try:
        if not ended.wait(LOAD_SECONDS):
            return f"loading did not end within {LOAD_SECONDS:.0f} s"
    finally:
        was_running = not codes
        child.close()
    if was_running:
        return None
    said = next((line for line in reversed(lines) if line.startswith(FAILED)), None)
    if said is not None:
        return said.removeprefix(FAILED)
    return f"the process that loads it ended with {codes[0]}"
