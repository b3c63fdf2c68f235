"""Objects, parameters and optimizer states from one rank to the others, under Horovod's names. Training thread only.

Objects are pickled: they come from peers of the mesh, which have proved that they hold the job's key.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.state.handover import pickled
from spark_elastic.torch.collectives import broadcast_
from spark_elastic.torch.topology import free_group

T = TypeVar("T")


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None, process_set: object = None) -> T:
    """The object of rank `root_rank`, on all ranks."""
    _whole_world(process_set)
    group = free_group()
    if group is None or group.size == 1:
        return obj
    mine = np.frombuffer(pickled(obj), np.uint8) if group.rank == root_rank else np.empty(0, np.uint8)
    length = np.array([mine.nbytes], np.int64)
    group.broadcast(length, root_rank)
    data = mine if group.rank == root_rank else np.empty(int(length[0]), np.uint8)
    group.broadcast(data, root_rank)
    return obj if group.rank == root_rank else pickle.loads(data.tobytes())


def allgather_object(obj: T, name: str | None = None, process_set: object = None) -> list[T]:
    """All ranks' objects, in rank order."""
    _whole_world(process_set)
    group = free_group()
    return [obj] if group is None else [pickle.loads(data) for data in group.allgather_bytes(pickled(obj))]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor | None]], root_rank: int
) -> None:
    """Overwrite parameters with those of `root_rank`. params: a state dict or named parameters."""
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor.data, root_rank)
        elif tensor is not None:
            raise InvalidInput(f"broadcast_parameters takes tensors; {name!r} is a {type(tensor).__name__}.")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the optimizer's state and settings with those of `root_rank`. model: of no use here."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("broadcast_optimizer_state does not take LBFGS: its state is not per parameter.")
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))


def _whole_world(process_set: object) -> None:
    if process_set is not None:
        raise InvalidInput("process sets are not supported yet: leave process_set out.")
