"""A small net trained by hand, alone or on ranks that are threads of this process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch

from elastic_collectives import Group
from spark_elastic.worker.context import GroupContext, ProcessContext

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


class CurrentWorker(threading.local):
    """The current worker of each thread, as each process has one of its own."""

    group: Group | None = None
    group_context: GroupContext
    process: ProcessContext
    is_worker = False

    def __init__(self) -> None:
        self.process = ProcessContext()


def enter(here: CurrentWorker, group: Group | None) -> None:
    here.group, here.group_context, here.is_worker = group, GroupContext(), True


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
