"""Parameters and optimizer states from one rank to the others, under Horovod's names. Training thread only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.objects import broadcast_object
from spark_elastic.ops.process_sets import global_process_set
from spark_elastic.torch.gathering import broadcast_all


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor | None] | torch.Tensor], root_rank: int
) -> None:
    """Overwrite parameters with those of `root_rank`. params: a state dict, or parameters with or without names."""
    entries = sorted(params.items()) if isinstance(params, Mapping) else params
    tensors = []
    for number, entry in enumerate(entries):
        name, tensor = entry if isinstance(entry, tuple) else (number, entry)
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
