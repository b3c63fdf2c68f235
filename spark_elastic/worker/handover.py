"""What a slot hands to a training process or a fork server that it starts: their modules, and what goes through pipes.

Apart from them, for a slot imports neither the engine nor numpy, which take longer than all else that it does.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.protocol.types import Fence, Position, SlotIdentity, SlotSpec, WorkerId

ENTRY, FORK_SERVER = "spark_elastic.worker.entry", "spark_elastic.worker.fork_server"  # modules to run
IMPORT_LATER = "import-later"  # an argument: early imports have killed a process, and are left to the program
FORK, SERVE = b"fork", b"serve"  # ask a fork server for a process, and for a server for another slot
ADOPT, STARTED = b"adopt", "started"  # the slot has the process; it has started
ANSWER_WITHIN = 1.0  # seconds that another slot gets for its message, and a server for its connection


@dataclass(frozen=True)
class ChildFds:
    """Descriptors that a training process inherits from its slot."""

    status: int  # writing end of the pipe on which the process says that it is warm
    activity: int  # file of `stack_reader`: since when the main thread waits or works
    stacks: int  # file of `stack_reader`: where the main thread is


@dataclass(frozen=True)
class Header:
    """What a slot tells its child process on the first line of its standard input."""

    spec: SlotSpec  # the same for all slots of the job
    identity: SlotIdentity  # of the slot; the process's own worker id follows, once it becomes a worker
    parent: int  # process id of the slot
    payload_bytes: int  # length of the pickled program, which follows the header
    fds: ChildFds  # for a process that was spawned; one that was forked has its own numbers for them


@dataclass(frozen=True)
class Activation:
    """What makes a warm process a worker, on a line of its standard input."""

    worker: WorkerId  # its id from now on
    left: Fence | None = None  # as in `WorkerIdentity`
    position: Position | None = None  # likewise


def describe_exit(code: int) -> str:
    """How a process ended. code: as subprocess gives it."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
