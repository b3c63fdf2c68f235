"""Makes commits of a hand-written training durable, and takes a run up again from them.

Rank 0 hands over a commit at the next one of the same world: only then it is part of what every survivor holds, or
takes over. The training thread calls all of this and copies the bytes; the writer's thread does the rest. What comes
back is unpickled: whoever can write to the store can run code on the workers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import numpy as np

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.state.checkpoint import CheckpointPolicy, CheckpointStore, CheckpointWriter, Schedule
from spark_elastic.state.commit import Snapshot
from spark_elastic.state.handover import pickled

DURABLE = "durable"  # in `WorkerSession.persistent`: this process's DurableCommits
PICTURE, MEMORY = "picture.pkl", "memory.bin"


class DurableCommits:
    """Of one training process. tell: hands what was written to the driver, which decides whether it counts (R18)."""

    def __init__(
        self, store: Store, policy: CheckpointPolicy, clock: Clock, tell: Callable[[Checkpoint], object]
    ) -> None:
        self._checkpoints = CheckpointStore(store, policy.run_id)
        self._schedule = Schedule(policy, clock)
        self._writer = CheckpointWriter(self._checkpoints, tell)
        self._handed = 0  # number of the newest commit that was
        self._read: tuple[tuple[Checkpoint, ...], Snapshot] | None = None

    def begun(self) -> None:
        """A commit is about to be made, so the world that began from a checkpoint stands."""
        self._read = None

    def committed(self, fence: Fence, former: Snapshot | None) -> None:
        """Another commit is about to be made; `former` is the one before it. Rank 0 alone calls this."""
        if self._schedule.step():
            self._offer(fence, former)

    def finish(self, fence: Fence, newest: Snapshot | None) -> None:
        """All ranks agreed to stop, or rank 0 has ended: the newest commit is durable when this returns."""
        self._offer(fence, newest)
        self._writer.flush()

    def restore(self, candidates: Sequence[Checkpoint]) -> Snapshot:
        """The first of the candidates that is whole; read once until a commit is made.

        Those who wait may give this world up meanwhile: a checkpoint that takes longer than `collective_timeout` would
        be read again in each world and never be gone on from.

        Raises:
            StoreError: none of them is.
        """
        asked = tuple(candidates)
        if self._read is None or self._read[0] != asked:
            _, parts = self._checkpoints.read_newest(asked)
            number, picture = pickle.loads(parts[PICTURE])
            memory = np.frombuffer(parts[MEMORY], np.uint8).copy()
            self._read = asked, Snapshot(number, picture, memory)
        return self._read[1]

    def close(self) -> None:
        self._writer.close()

    def _offer(self, fence: Fence, commit: Snapshot | None) -> None:
        if commit is None or commit.version <= self._handed:
            return
        self._handed = commit.version
        picture, memory = pickled((commit.version, commit.picture)), commit.memory.tobytes()
        position = Position(0, Phase.TRAIN, commit.version)
        self._writer.offer(fence, position, lambda: {PICTURE: picture, MEMORY: memory})
