"""What a worker runs, seen from its loop: a program that can be interrupted and carried on in another world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from elastic_collectives import CollectiveError, Group
from spark_elastic.protocol.types import Checkpoint, Position, World

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
class Session:
    """What a running program may use of its worker.

    membership_version: newest version of the membership that this worker heard of; goes into the trailer.
    tell: called with the position after each change of it; cheap, no I/O.
    report: ships a few numbers to the driver for the progress line; may drop some, never blocks.
    next_world: for a program that keeps control over worlds: leaves this one (None: at a boundary that all ranks agreed
    on; an error: because it broke) and returns the next and its group. Unwinds by `Left` when there is none.
    kept: what outlives one call of a user's function, by name.
    wrote_checkpoint: tells the driver, which decides whether it counts (R18); any thread, one short request.
    """

    membership_version: Callable[[], int]
    tell: Callable[[Position], None]
    report: Callable[[Mapping[str, Any]], None]
    next_world: Callable[[CollectiveError | None], tuple[World, Group]]
    kept: dict[str, Any] = field(default_factory=dict)
    wrote_checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None


class Left(BaseException):
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

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        """Go on from `position()` until the end, or until a boundary at which a change is wanted."""
        ...

    def close(self) -> None:
        """Free readers and threads."""
        ...


def environment_of(program: object) -> Mapping[str, str]:
    """The variables that it wants, if any."""
    found: Mapping[str, str] = getattr(program, "environment", {})
    return found
