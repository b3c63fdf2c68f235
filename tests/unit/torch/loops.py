"""A small net trained by hand, alone or on ranks that are threads of this process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

X = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
NET = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def net() -> torch.nn.Sequential:
    """The same one each time, whatever other threads draw."""
    return copy.deepcopy(NET)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train_plain(batches: list[torch.Tensor], make: Callable[[Any], torch.optim.Optimizer]) -> torch.Tensor:
    model = net()
    opt = make(model.parameters())
    for batch in batches:
        opt.zero_grad()
        model(batch).pow(2).mean().backward()
        opt.step()
    return weights(model)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1)


class LoaderWorld:
    """What the loaders of a test take for this worker's world."""

    rank, size = 0, 1


class Exchange:
    """An optimizer's exchange of gradients, which a loader tells the virtual shares."""

    def __init__(self) -> None:
        self.shares: list[str] = []

    def begin_share(self) -> None:
        self.shares.append("begin")

    def end_share(self) -> None:
        self.shares.append("end")
