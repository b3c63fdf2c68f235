"""`FSDPState` on real processes: workers are killed at every place of a commit and of its restoration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.component.torch.divided_training import assert_exact, train
from tests.component.torch.hand_written import Run

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

EPOCHS = 4
Blows = list[tuple[str, int, tuple[int, ...]]]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same training by one process, without FSDP."""
    return train("", [], 1, EPOCHS)


def play(folder: Path, blows: Blows, size: int, epochs: int = EPOCHS, **given: Any) -> tuple[Run, list[Any]]:
    sizes = {"room": size, "num_workers": size, "max_workers": size}
    run = Run(train, (str(folder), blows, size, epochs), **sizes, **given)
    results = run.results()
    struck = {path.name for path in folder.iterdir() if re.fullmatch(r"\d+-\d+", path.name)}
    assert struck == {f"{number}-{rank}" for number, (_, _, ranks) in enumerate(blows) for rank in ranks}
    return run, results


@pytest.mark.faults
@pytest.mark.parametrize(
    ("size", "blows"),
    [
        (3, [("copies", 4, (1,)), ("step", 9, (2,)), ("build", 9, (0,))]),
        # Two hosts at once that do not hold a shard and its copy; then one, and another while the rest divide anew.
        (4, [("step", 4, (0, 2)), ("step", 9, (0,)), ("divide again", 9, (1,))]),
    ],
)
def test_kills_cost_no_committed_step_and_no_row(
    tmp_path: Path, alone: dict[str, Any], size: int, blows: Blows
) -> None:
    run, results = play(tmp_path, blows, size)
    assert_exact(results, alone, EPOCHS)
    assert run.sizes()[0] == size
    assert len(run.sizes()) > len(blows)


def test_kills_cost_no_committed_step_and_a_shard_lost_with_its_copy_comes_from_the_checkpoint(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    folder = tmp_path / "blows"
    folder.mkdir()
    given = {"run_id": "mine", "store": str(tmp_path / "store"), "checkpoint_steps": 2}
    blows: Blows = [("complete", 4, (0,)), ("divide", 4, (1,)), ("step", 9, (0, 1))]
    run, results = play(folder, blows, 3, **given)
    assert_exact(results, alone, EPOCHS)
    assert run.sizes()[0] == 3
    assert len(run.sizes()) > len(blows)
    assert "training continues from the checkpoint of commit" in run.lines.getvalue()
