"""A change of the world as people want it told: what happened, why, and what it cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What led to a world."""

    START = "start"
    LOSS = "loss"  # a member was lost, others go on
    PLANNED = "planned"  # members joined or left at a step boundary
    RESTART = "restart"  # nobody of the last world was left


UNPLANNED = (Kind.LOSS, Kind.RESTART)


@dataclass(frozen=True)
class WorldChange:
    """at: seconds since the launch at which it was published. before: size of the world that it follows.

    seconds: for how long nobody trained, until every member had built this world; None: it was never built.
    steps_lost: applied steps that are taken once more.
    """

    generation: int
    at: float
    kind: Kind
    before: int
    size: int
    joined: int
    left: int
    reason: str
    seconds: float | None = None
    steps_lost: int = 0

    def __str__(self) -> str:
        """One line: what happened and what it cost."""
        cost = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        return f"world of {self.size}: {self._what()}{cost}{self._steps()} ({self.reason})"

    def _what(self) -> str:
        match self.kind:
            case Kind.START:
                return "started"
            case Kind.LOSS:
                return f"{self.left} of {self.before} lost, recovered"
            case Kind.RESTART:
                return f"all {self.before} lost, started again"
        moves = [(self.joined, "joined"), (self.left, "left as planned")]
        return ", ".join(f"{count} {word}" for count, word in moves if count) or "formed anew"

    def _steps(self) -> str:
        if self.kind not in UNPLANNED:
            return ""
        return f", {self.steps_lost or 'no'} step{'' if self.steps_lost == 1 else 's'} lost"
