"""Objects, parameters and optimizer states from one rank to the others, under Horovod's names. Training thread only.

Objects are pickled: they come from peers of the mesh, which have proved that they hold the job's key.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.state.handover import pickled
from spark_elastic.torch.gathering import allgather, broadcast_, broadcast_all

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of rank `root_rank`, on all ranks."""
    if process_set.size() == 1:
        return obj
    is_root = process_set.ranks[process_set.rank()] == root_rank
    mine = _bytes_of(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    name = name or "object"
    length = broadcast_(torch.tensor([len(mine)]), root_rank, f"{name}.length", process_set)
    data = mine if is_root else torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else _object_of(data)


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """All ranks' objects, in rank order."""
    mine, name = _bytes_of(obj), name or "object"
    lengths = allgather(torch.tensor([len(mine)]), f"{name}.length", process_set).tolist()
    data = allgather(mine, f"{name}.data", process_set)
    return [_object_of(part) for part in torch.split(data, lengths)]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor | None]], root_rank: int
) -> None:
    """Overwrite parameters with those of `root_rank`. params: a state dict or named parameters."""
    named = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = []
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor):
            tensors.append(tensor.data)
        elif tensor is not None:
            raise InvalidInput(f"broadcast_parameters takes tensors; {name!r} is a {type(tensor).__name__}.")
    broadcast_all(tensors, root_rank, "parameters", global_process_set, awaited=True)()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the optimizer's state and settings with those of `root_rank`. model: of no use here."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("broadcast_optimizer_state does not take LBFGS: its state is not per parameter.")
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank, "optimizer"))


def _bytes_of(obj: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickled(obj)), dtype=torch.uint8)


def _object_of(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
