"""A training whose workers are threads of this process, and what stands for the world and the driver there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from elastic_collectives import Group
from spark_elastic.protocol.types import INITIAL_VERSION, Fence


def make_world(**changes: Any) -> Any:
    """A first world, of which rank 0 has the state."""
    world = {"version": INITIAL_VERSION, "fence": Fence(1, 1), "source": 0, "resume": (), "receives": False}
    return SimpleNamespace(**world | changes)


def make_handle(**reports: Callable[..., object]) -> Any:
    """A driver whose membership stays. reports: what is called in place of its own, which do nothing."""
    handle = {
        "membership_version": lambda: INITIAL_VERSION,
        "report_position": lambda position: None,
        "report_metrics": lambda numbers: None,
    }
    return SimpleNamespace(**handle | reports)


def run_task(
    task: Any,
    group: Group,
    then: Callable[[Any], object] = lambda task: None,
    **reports: Callable[..., object],
) -> Any:
    """The outcome of a training without checkpoints, on one rank. then: called with the task before it is closed."""
    task._spec = replace(task._spec, checkpoints=None)
    task.prepare()
    outcome = task.run(make_world(), group, make_handle(**reports))
    then(task)
    task.close()
    return outcome
