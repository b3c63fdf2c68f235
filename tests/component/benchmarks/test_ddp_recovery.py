"""The recovery of a DDP loop is measured on real processes; the figures themselves are the benchmark's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts.loop_recovery import measure_recovery

pytestmark = [pytest.mark.native, pytest.mark.faults, pytest.mark.timeout(300)]

BUDGET = 5000.0  # milliseconds; the benchmark's figures are a twentieth of it


def test_a_ddp_loop_takes_its_next_step_within_the_budget_after_a_kill(tmp_path: Path) -> None:
    beside_a_step, beyond_the_step, longest = measure_recovery(tmp_path, 2, 1)
    assert 0 < beside_a_step.ours == longest.ours < BUDGET
    assert beyond_the_step.ours < beside_a_step.ours
