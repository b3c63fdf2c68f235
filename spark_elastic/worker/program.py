"""What a worker runs, seen from its loop: a program that can be interrupted and carried on in another world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from elastic_collectives import Group
from spark_elastic.protocol.types import Position, World


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
    """

    membership_version: Callable[[], int]
    tell: Callable[[Position], None]
    report: Callable[[Mapping[str, Any]], None]


class Program(Protocol):
    """User code made elastic. All methods are called from the worker's main thread.

    A broken exchange is raised as `elastic_collectives.CollectiveError` after the program has put itself back to its
    position: the loop then joins the next world and calls `sync` and `run` again.
    """

    def prepare(self) -> None:
        """Load and import whatever takes long, before the worker is called warm."""
        ...

    def position(self) -> Position | None:
        """Where the program's state stands; None before it took part in any world."""
        ...

    def sync(self, world: World, group: Group) -> Position:
        """R5: hand over or take the state of `world.source`, into staging, verified, then swapped."""
        ...

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        """Go on from `position()` until the end, or until a boundary at which a change is wanted."""
        ...

    def close(self) -> None:
        """Free readers and threads."""
        ...
