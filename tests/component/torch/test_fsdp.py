"""`FSDPState` on real processes: workers are killed at every place of a commit and of its restoration."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("size", "blows", "is_durable"),
    [
        # A shard is lost with its copy, and both come from the checkpoint.
        (3, [("complete", 4, (0,)), ("divide", 4, (1,)), ("step", 9, (0, 1))], True),
        pytest.param(
            *(3, [("copies", 4, (1,)), ("step", 9, (2,)), ("build", 9, (0,))], False),
            marks=pytest.mark.faults,
        ),
        # Two hosts at once that do not hold a shard and its copy; then one, and another while the rest divide anew.
        pytest.param(
            *(4, [("step", 4, (0, 2)), ("step", 9, (0,)), ("divide again", 9, (1,))], False),
            marks=pytest.mark.faults,
        ),
    ],
)
def test_kills_cost_no_committed_step_and_no_row(
    tmp_path: Path, alone: dict[str, Any], size: int, blows: Blows, is_durable: bool
) -> None:
    folder = tmp_path / "blows"
    folder.mkdir()
    kept = {"run_id": "mine", "store": str(tmp_path / "store"), "checkpoint_steps": 2} if is_durable else {}
    sizes: Any = {"room": size, "num_workers": size, "max_workers": size}
    sizes["modules"] = ("torch.distributed.fsdp",)
    run = Run(train, (str(folder), blows, size, EPOCHS), **sizes, **kept)
    assert_exact(run.results(), alone, EPOCHS)
    struck = {path.name for path in folder.iterdir()}
    assert struck == {f"{number}-{rank}" for number, (_, _, ranks) in enumerate(blows) for rank in ranks}
    assert run.sizes()[0] == size
    assert len(run.sizes()) > len(blows)
    assert ("continues from the checkpoint of commit" in run.lines.getvalue()) == is_durable
