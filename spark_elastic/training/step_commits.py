"""The commits of an estimator's steps that this worker's host keeps: R23 (kept commits).

Those of short steps would cost more than repeating such a step, so a commit waits for a later step until what the
newest one cost, in this thread and in the background, is a small share of the time since. The worker's main thread
calls everything here.
"""

from __future__ import annotations

import math
from collections import deque

from spark_elastic.clock import Clock
from spark_elastic.protocol.types import WorldView
from spark_elastic.runs.kept_commits import CommitKeeper
from spark_elastic.runs.snapshot import SnapshotBuffer
from spark_elastic.training.trainer import TrainingState

SHARE = 0.05  # of the time, that commits cost at most
LONGEST = 0.5  # seconds from one commit to the next, if this thread alone spends no more than its share


class StepCommits:
    def __init__(self, keeper: CommitKeeper | None, clock: Clock) -> None:
        """keeper: None: nothing is kept."""
        self._keeper, self._clock = keeper, clock
        self._buffer = SnapshotBuffer(keeper, warns=False)
        self._began = -math.inf  # when the newest commit of this world began
        # Seconds for which the newest two held this thread up. The lesser one counts: it may have lost its processor.
        self._costs: deque[float] = deque(maxlen=2)

    def begin_world(self, world: WorldView) -> None:
        if self._keeper is not None:
            self._keeper.begin_world(world.fence, keeps=world.me.local_rank == 0)
        self._began = -math.inf  # its first step is kept

    def wait(self) -> None:
        """Before the state changes: wait until it is copied."""
        self._buffer.wait()

    def keep(self, state: TrainingState, *, at_once: bool = False) -> None:
        """Keep the state of a step, if a commit is due. at_once: it is, and is kept when this returns."""
        keeper, now = self._keeper, self._clock.now()
        if keeper is None or not keeper.keeps or (now < self._began + self._find_interval() and not at_once):
            return
        newest = self._buffer.wait_for_newest()
        if newest is None or newest.position != state.position:
            self._began, allocations = now, keeper.allocations
            self._buffer.begin(state.position, state.capture)
            if keeper.allocations == allocations:  # which costs more than a commit
                self._costs.append(self._clock.now() - now)
        if at_once:
            self.wait()

    def _find_interval(self) -> float:
        """Seconds from the newest commit to the next."""
        held_up = min(self._costs, default=0.0)
        return min((held_up + self._buffer.copy_seconds) / SHARE, max(LONGEST, held_up / SHARE))
