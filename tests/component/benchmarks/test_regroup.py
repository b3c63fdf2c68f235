"""Recovery by the size of the world, on real processes; the figures themselves are the benchmark's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts import regroup
from benchmarks.parts.budget import Budget

BUDGET = 5.0  # seconds; the benchmark's figures are a twentieth of it


@pytest.mark.scenario("G11")
@pytest.mark.parametrize("size", [2, 6])
def test_survivors_of_a_kill_regroup_within_the_budget_at_any_world_size(size: int, tmp_path: Path) -> None:
    """A member is killed; the newcomer in its place costs the others no step."""
    trial = regroup.play(tmp_path / "trial", size, [regroup.kill_one])
    ((moment, generation),) = trial.done
    seconds, lines = regroup.find_event_after(trial, moment, generation, "runs")
    assert seconds < BUDGET
    # A newcomer that is warm before the last survivor asks comes into the same world.
    assert {line["size"] for line in lines} <= {size - 1, size}
    assert regroup.count_broken(trial, {generation}) == size - 1
    assert regroup.count_broken(trial, {line["generation"] for line in trial.lines()} - {generation}) == 0
    (up,) = regroup.scale_ups(trial)
    assert up < BUDGET


def test_what_a_spent_budget_leaves_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Budget(60.0).take("abc", "cases")) == list("abc")
    assert list(Budget(60.0).share(2).take("abc", "cases")) == list("abc")
    assert not capsys.readouterr().out
    assert list(Budget(-1.0).share(2).take("abc", "cases")) == ["a"]
    assert capsys.readouterr().out == "left out after 0 s: 2 of 3 cases\n"
