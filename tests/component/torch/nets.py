"""Nets and optimizers of the small training jobs."""

from __future__ import annotations

from typing import Any

import torch

from tests.component.torch.job import CLASSES, WIDTH, SlowNet


def add_pace(*layers: torch.nn.Module, pace: float = 0.01) -> torch.nn.Module:
    return SlowNet(torch.nn.Sequential(*layers), pace).double()


def mlp(pace: float = 0.01) -> torch.nn.Module:
    torch.manual_seed(1)
    return add_pace(torch.nn.Linear(WIDTH, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES), pace=pace)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
