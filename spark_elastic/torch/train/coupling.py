"""Layers that make a step depend on how its rows are split over workers (R9). Pure looking at a module; no thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from spark_elastic.torch.sync_batch_norm import SyncBatchNorm
from spark_elastic.training.coupling import sentence


def world_dependence(model: torch.nn.Module) -> str | None:
    """One sentence that names the layers, or None: then weights equal those of any other world, up to rounding."""
    return sentence((name or "the model", why) for name, why in _dependent(model))


def shares_statistics(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether forward passes of all ranks meet, so that each must make the same number of them, of all its rows."""
    return any(isinstance(module, SyncBatchNorm) and module.training for module in modules)


def _dependent(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm | SyncBatchNorm):
            yield name, f"{type(module).__name__}: statistics of each worker's own rows"
        elif _is_random(module):
            yield name, f"{type(module).__name__}: random in each worker"


def _is_random(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.RReLU):
        return True
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float | int) and rate > 0.0  # RNNs and attention hold a number, others a module
