"""Where training stands, for user code that runs inside a step: a model's `forward`, a hook, a logger."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.worker.context import current


@dataclass(frozen=True)
class Progress:
    """epoch, step: of the step being taken, from 0. generation: of the world that takes it."""

    epoch: int
    step: int
    generation: int
    rank: int
    size: int


def progress() -> Progress | None:
    """The step that this worker is taking; None outside of training."""
    worker = current()
    if worker is None or worker.world is None or worker.group is None or worker.position is None:
        return None
    return Progress(
        worker.position.epoch,
        worker.position.step,
        worker.world.fence.generation,
        worker.group.rank,
        worker.group.size,
    )
