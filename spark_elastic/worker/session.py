"""What code in a worker asks of it: the world's group, and numbers for people. Training thread only."""

from __future__ import annotations

import math
from typing import Any

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import CollectiveThread, get_context
from spark_elastic.worker.program import WorkerHandle

METRICS = "metrics"  # key of the process's values: all numbers reported so far
RESERVED = ("step", "steps", "rows", "world", "checkpoint_seconds")  # numbers that the job counts itself


def get_group() -> Group | None:
    """The current world's group; None in a process that is not a worker.

    Raises:
        CollectiveError: the worker is between two worlds.
    """
    worker = get_context()
    return None if worker is None else worker.require_group()


def get_collective_thread() -> CollectiveThread | None:
    """The thread that calls the current world's collectives; None in a process that is not a worker."""
    worker = get_context()
    return None if worker is None else worker.group_context.collective_thread


def report(**numbers: Any) -> None:
    """Show these numbers of a training, as `report(loss=0.3, accuracy=0.9)`; each stays until it is reported anew.

    Cheap enough for every step: four times a second the newest numbers go to the driver, which shows those of rank 0.
    Takes any value that `float` takes. Does nothing in a process that is no worker.

    Raises:
        InvalidInput: a value is not a number, the job counts a number of that name itself, or `epoch` is not finite.
    """
    metrics: dict[str, Any] = {}
    for name, value in numbers.items():
        if name in RESERVED:
            raise InvalidInput(f"report() counts {name} itself: give yours under another name.")
        try:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if hasattr(value, "detach"):  # a tensor of torch, which warns where a gradient would be lost
                value = value.detach()
            metrics[name] = value if is_whole else float(value)
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"report() takes numbers; {name} is a {type(value).__name__} and no number: {error}."
            ) from error
    if not -math.inf < metrics.get("epoch", 0) < math.inf:
        raise InvalidInput(f"report() takes a finite epoch, not {metrics['epoch']}.")
    worker = get_context()
    if worker is not None and worker.handle is not None:
        size = {} if worker.world is None else {"world": worker.world.size}
        update_metrics(worker.handle, {**metrics, **size})


def update_metrics(handle: WorkerHandle, numbers: dict[str, Any]) -> None:
    """Report numbers in addition to those reported before.

    They are stored where they outlive one call of the user's function: a count of commits alone does not take the loss
    off the status page.
    """
    metrics: dict[str, Any] = handle.process_values.setdefault(METRICS, {})
    metrics.update(numbers)
    handle.report_metrics(dict(metrics))


def task_resources() -> dict[str, tuple[str, ...]]:
    """Addresses by resource, as `TaskContext.resources()` has them: {"gpu": ("0",)}; empty where there are none.

    For the function on a worker. The addresses are the slot's own, so no two workers of a host share one.
    """
    worker = get_context()
    return {} if worker is None else dict(worker.resources)
