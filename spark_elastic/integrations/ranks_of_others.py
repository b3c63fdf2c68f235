"""Mends what Accelerate and Lightning take for a worker's place in its world, when a worker imports them.

Changes nothing in a process that is no worker. Main thread only.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from spark_elastic.worker.context import get_context

FOLLOWED = "_followed_by_spark_elastic"  # attribute of a module whose class is mended


def follow(module: ModuleType) -> None:
    """Mend the class of a module that was imported; any number of times."""
    if hasattr(module, FOLLOWED):
        return
    setattr(module, FOLLOWED, True)
    if module.__name__ == "accelerate.state":
        _follow_accelerate(module)
    else:
        _follow_lightning(module)


def _follow_accelerate(module: Any) -> None:
    """Let a bare `PartialState()` read ACCELERATE_USE_CPU, as `Accelerator()` does: on CPUs it would take each worker
    for a training of its own, and say nothing."""
    plain = module.PartialState.__init__

    @wraps(plain)
    def init(self: Any, cpu: bool = False, **options: Any) -> None:
        is_worker = get_context() is not None
        plain(self, cpu or (is_worker and module.parse_flag_from_env("ACCELERATE_USE_CPU")), **options)

    module.PartialState.__init__ = init


def _follow_lightning(module: Any) -> None:
    """A function made for TorchDistributor says `devices=1, num_nodes=N`: each worker is a node with one device then,
    whichever workers its machine has besides."""
    plain = module.ParallelStrategy.local_rank

    def local_rank(self: Any) -> int:
        rank: int = plain.fget(self)
        environment = type(self.cluster_environment).__name__
        if get_context() is None or environment != "TorchElasticEnvironment" or not self.parallel_devices:
            return rank
        return rank % len(self.parallel_devices)

    module.ParallelStrategy.local_rank = property(local_rank, doc=plain.__doc__)
