"""When a training makes its state durable, and how the state becomes bytes and comes back.

Rank 0 copies its state after a step that is due, and hands the copy to the writer once the next exchange of the same
world is complete, or the epoch's barrier: only then the step is sealed (R1), that is part of the history of every
survivor. The copying is the training thread's, everything else the writer's.
"""

from __future__ import annotations

from collections.abc import Callable

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Checkpoint, Fence, Position
from spark_elastic.state.checkpoint import Checkpoints
from spark_elastic.state.checkpoint_writer import CheckpointWriter
from spark_elastic.state.schedule import CheckpointPolicy, Schedule
from spark_elastic.training.learner import Objects, TrainingState


class Checkpointing:
    """The checkpoints of one training process. tell: tells the driver which were written."""

    def __init__(
        self, store: Store, policy: CheckpointPolicy, clock: Clock, tell: Callable[[Checkpoint], object]
    ) -> None:
        self._schedule = Schedule(policy, clock)
        self._clock = clock
        self.seconds = 0.0  # for which copying held up the training thread
        self._writer = CheckpointWriter(Checkpoints(store, policy.run_id), tell)
        self._copied: tuple[Position, Callable[[], Objects]] | None = None

    def applied(self, state: TrainingState) -> None:
        """A step was applied; copies the state where a checkpoint is due."""
        if self._schedule.step():
            began = self._clock.now()
            self._copied = state.position, state.copied()
            self.seconds += self._clock.now() - began

    def sealed(self, fence: Fence) -> None:
        """The step that was copied is part of the history: hand the copy to the writer."""
        copied, self._copied = self._copied, None
        if copied is not None:
            self._writer.offer(fence, *copied)

    def finish(self, fence: Fence, state: TrainingState) -> None:
        """All ranks stop here for good: the state is durable when this returns."""
        self._copied = state.position, state.copied()
        self.sealed(fence)
        self._writer.flush()

    def unsealed(self) -> None:
        """The world broke before the step was surely history: drop the copy."""
        self._copied = None

    def close(self) -> None:
        self._writer.close()


def restore(store: Store, run_id: str, candidates: tuple[Checkpoint, ...], state: TrainingState) -> None:
    """Take over the first of the candidates that is whole.

    Raises:
        StoreError: none of them is.
    """
    _, objects = Checkpoints(store, run_id).read_newest(candidates)
    state.restore(objects)
