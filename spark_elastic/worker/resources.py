"""What Spark gave to the slot of this worker."""

from __future__ import annotations

from spark_elastic.worker.context import current


def task_resources() -> dict[str, tuple[str, ...]]:
    """Addresses by resource, as `TaskContext.resources()` has them: {"gpu": ("0",)}; empty where there are none.

    For the function on a worker: the addresses are the slot's own, so that no two workers of a host take the same.
    """
    here = current()
    return {} if here is None else dict(here.resources)
