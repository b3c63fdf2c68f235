"""A whole training in a world of threads equals one process: losses, schedules, callbacks, metrics, validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_collectives import Group
from tests.component.torch.job import difference, make_data
from tests.component.torch.test_training_hooks import make_job, plain, same_history
from tests.unit.torch.worlds import in_a_world

pytestmark = pytest.mark.native


def test_p2_with_everything_that_hangs_on_a_training(tmp_path: Path) -> None:
    (store, manifest), job = make_data(tmp_path), make_job()
    world: Any = SimpleNamespace(version=0, fence=(1, 1), source=0, resume=(), receivers=())
    session: Any = SimpleNamespace(
        membership_version=lambda: 0, tell=lambda position: None, report=lambda numbers: None
    )

    def work(group: Group) -> tuple[Any, Any]:
        task = job.task(store, manifest)
        task._spec = replace(task._spec, checkpoints=None)
        task.prepare()
        outcome = task.run(world, group, session)
        task._state.restore(task._state.copied()())  # all of it goes into a checkpoint and back
        task.close()
        return task._learner.state.model.state_dict(), outcome

    (ours, outcome), *_ = in_a_world(2, work)
    theirs, history = plain(job, store, manifest)
    assert difference(ours, theirs) < 1e-9
    same_history(SimpleNamespace(results=[outcome.result]), history)
