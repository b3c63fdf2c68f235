"""When a simulated worker writes checkpoints: in the order in which `training.checkpointing` and its writer do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from spark_elastic.protocol.types import Fence, Position
from spark_elastic.testing.fault_plan import Moment

if TYPE_CHECKING:
    from spark_elastic.testing.simulated_hosts import SimWorker

Chain = tuple[int, int]


class SimKeeper:
    """Rank 0 copies its state after a step that is due, writes the copy once the step is sealed (R1), one at a time,
    and tells the driver."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._steps = 0
        self._copied: tuple[Position, Chain] | None = None
        self._waiting: tuple[Fence, Position, Chain] | None = None
        self._writing = False

    def applied(self) -> None:
        every = self._worker.sim.plan.checkpoint_every
        if every is None or self._worker.rank != 0:
            return
        self._steps += 1
        if self._steps >= every:
            self._steps = 0
            self._copied = self._worker.position, self._worker.chain

    def sealed(self, fence: Fence) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            self._waiting = (fence, *copied)
            self._write()

    def broke(self) -> None:
        self._copied = None

    def _write(self) -> None:
        if self._writing or self._waiting is None:
            return
        job, self._waiting, self._writing = self._waiting, None, True
        seconds = self._worker.sim.rng.uniform(0.005, 0.2)
        self._worker.later(seconds / 2, partial(self._half_written, *job))
        self._worker.later(seconds, partial(self._written, *job))

    def _half_written(self, fence: Fence, position: Position, chain: Chain) -> None:
        self._worker.sim.run.write_half(fence, position)
        self._worker.sim.moment(Moment.WRITING)

    def _written(self, fence: Fence, position: Position, chain: Chain) -> None:
        checkpoint = self._worker.sim.run.write(fence, position, chain)
        self._worker.slot.desk.wrote(self._worker, checkpoint)
        self._writing = False
        self._worker.sim.moment(Moment.WRITTEN)
        self._write()
