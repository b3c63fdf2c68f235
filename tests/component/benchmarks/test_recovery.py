"""Recovery is measured on real processes; the figures themselves are the benchmark's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts import regroup
from benchmarks.parts.loop_recovery import measure_recovery
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


@pytest.mark.native
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_ddp_loop_takes_its_next_step_within_the_budget_after_a_kill(tmp_path: Path) -> None:
    beside_a_step, beyond_the_step, longest = measure_recovery(tmp_path, 2, 1)
    assert 0 < beside_a_step.ours == longest.ours < 1000 * BUDGET
    assert beyond_the_step.ours < beside_a_step.ours
