"""What must always hold of checkpoints, whatever dies: P7 and the rules R10 and R18. Used by the simulation; pure."""

from __future__ import annotations

from collections.abc import Sequence

from spark_elastic.protocol.types import Checkpoint, WorkerId, World
from spark_elastic.testing.invariants import Story, Violation


class Durability:
    """Follows one run over all its drivers."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._holder = 0
        self._acknowledged: dict[str, Checkpoint] = {}
        self._damaged: set[str] = set()

    def opened(self, attempt: int) -> None:
        """A driver took the run."""
        self._require(
            attempt > self._holder, f"attempt {attempt} was taken after attempt {self._holder} (R10)"
        )
        self._holder = attempt

    def acknowledged(self, attempt: int, kept: Sequence[Checkpoint]) -> None:
        """The store has the list of that driver: from here on its newest is durable."""
        self._require(
            attempt == self._holder, f"attempt {attempt} published, {self._holder} holds the run (R10)"
        )
        self._acknowledged.update({checkpoint.name: checkpoint for checkpoint in kept})

    def damaged(self, name: str) -> None:
        """Its bytes in the store are not what was written."""
        self._damaged.add(name)

    def is_damaged(self, name: str) -> bool:
        return name in self._damaged

    def begins(self, world: World, still_training: Sequence[WorkerId]) -> None:
        """A world to which nobody brings state. still_training: members of older worlds of the same driver."""
        self._require(
            not still_training,
            f"world {world.fence.generation} begins while {', '.join(still_training)} train on (R18)",
        )
        lost = not world.resume and world.fence.attempt == self._holder and self._newest()
        self._require(not lost, f"training begins from nothing although {lost} was acknowledged (P7)")

    def taken(self, world: World, checkpoint: Checkpoint) -> None:
        """The world begins from it. What a driver does that lost the run is nobody's loss."""
        self._require(checkpoint.name not in self._damaged, f"damaged checkpoint {checkpoint.name} was taken")
        newest = self._newest()
        of_holder = world.fence.attempt == self._holder
        older = of_holder and newest is not None and _order(checkpoint) < _order(newest)
        self._require(not older, f"{checkpoint.name} was taken although {newest} was acknowledged (P7)")

    def _newest(self) -> Checkpoint | None:
        whole = (each for name, each in self._acknowledged.items() if name not in self._damaged)
        return max(whole, key=_order, default=None)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"{what}\n{self._story.text()}")


def _order(checkpoint: Checkpoint) -> tuple[object, ...]:
    """R18: newest is the highest fence, then the furthest step."""
    return checkpoint.fence, checkpoint.position
