"""Loops that users copy, of a page and of a notebook, where a newcomer comes so late that no batch is left for it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from tests.component.torch.hand_written import Run, hold
from tests.pages import apply_diff, blocks
from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(300)]

for name in (__name__, hold.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[name])


def of_page() -> Callable[[int], Any]:
    before, _ = blocks("moving-from-torchdistributor.md", "python")
    program = apply_diff(before, blocks("moving-from-torchdistributor.md", "diff")[2])
    return define_train(program.replace("import spark_elastic\n", ""))


def of_notebook() -> Callable[[int], Any]:
    cells = json.loads((ROOT / "examples" / "notebooks" / "04-hand-written-loop.ipynb").read_text())["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if "def train" in "".join(cell["source"])]
    return define_train(source)


def define_train(program: str) -> Callable[[int], Any]:
    """Its function `train`; nothing is run."""
    names: dict[str, Any] = {"spark_elastic": SimpleNamespace(run=lambda *arguments, **named: [])}
    exec(compile(program, "page.py", "exec"), names)
    return names["train"]


def delay_commit(train: Callable[[int], Any], epochs: int, last: str) -> Any:
    """`train`, which awaits its second world in the last commit of an epoch, or in that of its last batch."""
    import spark_elastic.torch as hvd

    class SlowCommitState(hvd.elastic.TorchState):
        def commit(self) -> None:
            batches_done = self.sampler.processed_num >= len(self.sampler.dataset)
            done = self.epoch == epochs if last == "epoch" else batches_done
            if done:
                print("step 1", flush=True)  # noqa: T201 - what the test waits for
                hold(self, 2)
            super().commit()

    hvd.elastic.TorchState = SlowCommitState  # type: ignore[misc]
    return train(epochs)


@pytest.mark.parametrize(("program", "last"), [(of_page, "epoch"), (of_notebook, "batch")])
def test_the_documented_loop_keeps_the_last_loss_in_a_world_without_a_batch(
    program: Callable[[], Any], last: str
) -> None:
    run = Run(delay_commit, (program(), 1, last), room=2, num_workers=2, max_workers=3)
    run.at(1, lambda: run.cluster.add_room(1))
    results = run.results()
    assert run.sizes()[:2] == [2, 3]
    losses = [result[1] if isinstance(result, tuple) else result for result in results]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
