"""torch.distributed on elastic workers: the backend `elastic`, which needs no configuration inside of a job.

Importing this package registers it; a worker does so before the user's code runs. From then on, in a worker,

- `init_process_group()`, `"nccl"` and the device `cpu` of any backend string that names `gloo` mean `elastic`;
- `env://`, torch's default, gives this worker's rank, its world's size and the driver's key-value store.

In a process that is no worker, torch.distributed behaves as it does without this package. Main thread only.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import choose_channel
from spark_elastic.gradients.store import get_store
from spark_elastic.integrations.torch_distributed.process_group import NAME, ElasticProcessGroup
from spark_elastic.worker.context import get_context, get_process_context
from spark_elastic.worker.session import ALONE

__all__ = ["ElasticProcessGroup", "register"]

Rendezvous = Iterator[tuple[Any, int, int]]  # store, rank, size
_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]


class _WorldGroups:
    def __init__(self) -> None:
        # By name and ranks: how many groups there were, the same on all of their ranks.
        self.counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.groups: list[ElasticProcessGroup] = []

    def close(self) -> None:
        """End the process groups, since their world has ended; torch may form those of the next one."""
        default = dist.group.WORLD
        if any(group is default for group in self.groups):
            dist.destroy_process_group()
        for group in self.groups:
            group.shutdown()
        forget_meshes()


def forget_meshes() -> None:
    """Have operations on DTensors find anew of which mesh their results are: torch takes meshes of one shape for equal,
    whatever this process's rank in them, and results would have the place that it had in an earlier world."""
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


class _Registration:
    """Registers the backend when it is created, which a process does once."""

    def __init__(self) -> None:
        dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cpu"])
        # The flight recorder of torch 2.15 cannot attach itself to a group that is written in Python.
        not_attached: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        not_attached.add(NAME)
        distributed_c10d.BackendConfig = _make_backend_config(distributed_c10d.BackendConfig)  # type: ignore[misc]
        handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
        handlers["env"] = _make_env_handler(handlers["env"])


def register() -> None:
    """Let torch.distributed know the backend. Any number of times."""
    get_process_context().get_or_create(_Registration)


def _make_backend_config(original: Any) -> Any:
    class BackendConfig(original):  # type: ignore[misc]
        """torch's table of a process group's backends by device; in a worker, `elastic` carries the CPU's."""

        def __init__(self, backend: Any) -> None:
            is_worker = get_context() is not None
            # Where there is a GPU, torch would choose its backend if the program names none. NCCL alone knows of no
            # losses; `elastic` uses it for tensors of GPUs.
            means_elastic = is_worker and str(backend) in (dist.Backend.UNDEFINED, dist.Backend.NCCL)
            super().__init__(NAME if means_elastic else backend)
            if is_worker and self.get_device_backend_map().get("cpu") == dist.Backend.GLOO:
                # The first entry decides: torch keeps no other beside a process group that is written in Python.
                self.device_backend_map = {"cpu": dist.Backend(NAME)}

    return BackendConfig


def _make_env_handler(original: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    def give_store(
        url: str, timeout: timedelta = distributed_c10d.default_pg_timeout, **named: Any
    ) -> Rendezvous:
        worker = get_context()
        if worker is None or worker.driver is None:
            yield from original(url, timeout=timeout, **named)
            return
        group, given = worker.require_group(), dict(parse_qsl(urlparse(url).query))
        rank, size = int(given.get("rank", group.rank)), int(given.get("world_size", group.size))
        alone = worker.world is not None and worker.world.fence == ALONE  # of which the driver knows nothing
        yield _HashStore() if alone else get_store(worker, worker.driver, timeout), rank, size

    return give_store


def _create_group(options: Any, _: object = None) -> ElasticProcessGroup:
    """Create a process group of the current world; torch calls it on each of its ranks."""
    worker = get_context()
    if worker is None:
        raise InvalidInput(
            "the backend 'elastic' works inside of a job only: start the program with spark_elastic.run or "
            "spark-elastic-run, or call init_process_group('gloo')."
        )
    world = worker.require_group()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(world.size))
    _check_ranks(ranks, options, world)
    groups = worker.group_context.get_or_create_closeable(_WorldGroups)
    name = str(options.group_id)
    key = name, ranks, groups.counts[name, ranks]
    groups.counts[name, ranks] += 1

    def connect_pair(source: int, target: int) -> Group:
        pair = sorted((ranks[source], ranks[target]))
        return world.subgroup(choose_channel("torch", key, source, target), pair)

    own = world.subgroup(choose_channel("torch", key), ranks)
    group = ElasticProcessGroup(own, options.timeout, connect_pair, worker.wait_recorder, options.store)
    groups.groups.append(group)
    return group


def _check_ranks(ranks: tuple[int, ...], options: Any, world: Group) -> None:
    if list(ranks) != sorted(ranks):
        raise InvalidInput(f"the ranks of a process group must ascend; got {list(ranks)}.")
    if len(ranks) != options.group_size or ranks[-1] >= world.size or ranks[options.group_rank] != world.rank:
        raise InvalidInput(
            f"this worker is rank {world.rank} of {world.size}, and the process group was asked for as rank "
            f"{options.group_rank} of {options.group_size}: leave rank and world_size to init_process_group."
        )


register()
