"""What any trainer's adapter does with commits, without a trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.integrations.trainer_adapter import TrainerAdapter, TrainerState
from spark_elastic.runs.snapshot import SnapshotBuilder


class CountingAdapter(TrainerAdapter):
    """A trainer that counts its steps; as a value, or in memory."""

    step = 0

    def forget(self) -> None:
        self.step = 0

    def capture(self, builder: SnapshotBuilder) -> Any:
        return {"step": builder.add(np.full(8, self.step, np.uint8)) if self.has_memory else self.step}

    def restore_step(self) -> None:
        values, memory = self.pending
        self.step = int(values["step"].of(memory)[0]) if self.has_memory else values["step"]
        self.finish_restoring()


def hand_over(state: TrainerState, other: TrainerState) -> None:
    snapshot = state._snapshots.wait_for_newest()
    assert snapshot is not None
    other._load(snapshot)
    other.renew_commit()


@pytest.mark.parametrize("has_memory", [False, True])
def test_p3_a_commit_that_a_newcomer_has_not_restored_yet_is_handed_on(has_memory: bool) -> None:
    adapters = [CountingAdapter(commit_every=2) for _ in range(3)]
    states = []
    for adapter in adapters:
        adapter.has_memory = has_memory
        states.append(TrainerState(adapter=adapter))
    adapters[0].step = 7
    states[0].commit()
    hand_over(states[0], states[1])
    hand_over(states[1], states[2])  # the newcomer has trained nothing
    adapters[2].restore_step()
    assert adapters[2].step == 7


def test_a_commit_is_due_after_each_so_many_steps() -> None:
    adapter = CountingAdapter(commit_every=3)
    due = []
    for adapter.step in range(1, 10):
        if adapter.is_due():
            due.append(adapter.step)
            adapter.state = TrainerState(adapter=adapter)
            adapter.commit()
    assert due == [3, 6, 9]
    with pytest.raises(InvalidInput, match="commit_every is 0: give a number of steps"):
        CountingAdapter(commit_every=0)
