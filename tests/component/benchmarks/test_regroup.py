"""Recovery by the size of the world, on real processes; the figures themselves are the benchmark's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts import regroup
from benchmarks.parts.trial import find_last, kill_one

BUDGET = 5.0  # seconds; the benchmark's figures are a twentieth of it


@pytest.mark.scenario("G11")
@pytest.mark.parametrize("size", [2, 6])
def test_survivors_of_a_kill_regroup_within_the_budget_at_any_world_size(size: int, tmp_path: Path) -> None:
    """A member is killed; the newcomer in its place costs the others no step."""
    trial = regroup.play(tmp_path / "trial", size, [kill_one])
    ((moment, generation),) = trial.done
    assert find_last(trial, moment, generation, "runs") < BUDGET
    # A newcomer that is warm before the last survivor asks comes into the same world.
    assert {line["world"] for line in trial.lines()} <= {size - 1, size}
    assert regroup.count_broken(trial, {generation}) == size - 1
    assert regroup.count_broken(trial, {line["generation"] for line in trial.lines()} - {generation}) == 0
    (up,) = regroup.scale_ups(trial)
    assert up < BUDGET
