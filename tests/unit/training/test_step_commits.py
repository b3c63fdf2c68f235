"""R23: when an estimator's steps are kept, by what commits cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spark_elastic.protocol.types import Phase, Position
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder
from spark_elastic.testing import FakeClock
from spark_elastic.training.step_commits import LONGEST, SHARE, StepCommits

STEP = 0.001  # seconds


class Keeper:
    """Remembers when which step was kept."""

    allocations = 0
    keeps = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.kept: list[tuple[int, float]] = []

    def begin_world(self, fence: object, *, keeps: bool) -> None:
        self.keeps = keeps

    def allocate(self, nbytes: int) -> Bytes:
        self.allocations += 1
        return np.empty(nbytes, np.uint8)

    def owns(self, memory: Bytes) -> bool:
        return memory.nbytes > 0

    def begin(self, memory: object) -> None:
        """Nothing to write."""

    def keep(self, snapshot: Any) -> None:
        self.kept.append((snapshot.position.step, self.clock.now()))


class Training:
    """Steps whose commits hold the training up, and take time in the background."""

    def __init__(self, held_up: float, copying: float = 0.0) -> None:
        self.clock, self.held_up, self.step = FakeClock(), held_up, 0
        self.keeper = Keeper(self.clock)
        self.commits = StepCommits(self.keeper, self.clock)  # type: ignore[arg-type]
        self.copying = copying

    def begin_world(self, local_rank: int = 0) -> None:
        me = SimpleNamespace(local_rank=local_rank)
        self.commits.begin_world(SimpleNamespace(fence=None, me=me))  # type: ignore[arg-type]

    @property
    def position(self) -> Position:
        return Position(0, Phase.TRAIN, self.step)

    def capture(self, builder: SnapshotBuilder) -> Any:
        self.clock.advance(self.held_up)
        return builder.add_array(np.ones(9))

    def take_steps(self, number: int) -> list[int]:
        """Those that were kept."""
        before = len(self.keeper.kept)
        for _ in range(number):
            self.commits.wait()
            self.clock.advance(STEP)
            self.step += 1
            self.commits.keep(self)  # type: ignore[arg-type]
            self.commits._buffer.copy_seconds = self.copying
        return [step for step, _ in self.keeper.kept[before:]]


@pytest.mark.parametrize(
    ("held_up", "copying", "interval"),
    [
        (0.0, 0.0, STEP),
        (0.0001, 0.0, 0.002),
        (0.0005, 0.0005, 0.02),
        (0.001, 0.009, 0.2),
        (0.02, 0.4, LONGEST),
        (0.1, 0.4, 2.0),
    ],
)
def test_r23_commits_cost_their_share_of_the_time_and_wait_for_half_a_second_at_most(
    held_up: float, copying: float, interval: float
) -> None:
    training = Training(held_up, copying)
    training.begin_world()
    training.take_steps(10_000)
    ends = np.array([when for _, when in training.keeper.kept[2:]])
    between = np.diff(ends)
    assert len(between) > 3
    assert interval - 1e-9 <= min(between) <= max(between) <= interval + held_up + 2 * STEP
    if interval > LONGEST:
        assert max(between) <= held_up / SHARE + 2 * STEP


def test_r23_where_all_stop_and_where_a_world_begins_a_step_is_kept() -> None:
    training = Training(0.01)
    training.begin_world()
    assert training.take_steps(20) == [1, 2, 3], "memory that was allocated for two of them does not count"
    for _ in range(2):  # once
        training.commits.keep(training, at_once=True)  # type: ignore[arg-type]
    assert [step for step, _ in training.keeper.kept] == [1, 2, 3, 20]
    training.begin_world()
    assert training.take_steps(20) == [21]
    training.begin_world(local_rank=1)
    assert training.take_steps(300) == []
    training.commits.keep(training, at_once=True)  # type: ignore[arg-type]
    assert len(training.keeper.kept) == 5, "another worker of this machine keeps them"


def test_r23_one_commit_that_lost_its_processor_does_not_put_off_the_next_ones() -> None:
    training = Training(0.0001)
    training.begin_world()
    training.take_steps(10)
    training.held_up = 1.0
    while not training.take_steps(1):
        """Its commit is not due."""
    training.held_up = 0.0001
    assert len(training.take_steps(10)) > 3
