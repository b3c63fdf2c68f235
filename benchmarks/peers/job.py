"""The job that every peer trains: the table, the net, and the ledger in which a worker writes the rows of its steps.

Needs torch and nothing else, since it runs in each peer's own environment. The program that measures
(benchmarks/head_to_head.py) sets HEAD_TO_HEAD, the folder of the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 480  # rows of a step over all workers
EPOCHS = 2
FEATURES, WIDTH = 64, 1024
SEED = 7
HOSTS = 2  # most of them, with a worker each
CHECKPOINT_STEPS = 25  # between two checkpoints of the peers that need them


def folder() -> Path:
    return Path(os.environ["HEAD_TO_HEAD"])


def write_table(path: Path, steps: int) -> None:
    """Rows for `steps` steps in EPOCHS epochs, the same on every call."""
    drawn = torch.Generator().manual_seed(SEED)
    x = torch.randn(BATCH * steps // EPOCHS, FEATURES, generator=drawn)
    torch.save({"x": x, "y": x[:, :8].mean(dim=1, keepdim=True)}, path)


def open_table() -> torch.utils.data.TensorDataset:
    """Samples (row, x, y)."""
    table = torch.load(folder() / "table.pt")
    return torch.utils.data.TensorDataset(torch.arange(len(table["x"])), table["x"], table["y"])


def make_net() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 1))


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def save_weights(net: nn.Module) -> None:
    torch.save(net.state_dict(), folder() / "weights.new")
    os.replace(folder() / "weights.new", folder() / "weights.pt")


class Ledger:
    """A file per process; a line before and after each step, in the page cache when `write` returns."""

    def __init__(self, world: int, size: int) -> None:
        """world: a number that its members agree on. size: how many they are."""
        self._file = (folder() / "ledger" / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._world = world
        self._size = size

    def begin(self, step: int, rows: torch.Tensor) -> None:
        """This worker is about to compute gradients of these rows, for step 1, 2, ..."""
        self._write("begun", step, self._size, rows)

    def apply(self, step: int, rows: torch.Tensor, size: int | None = None) -> None:
        """The step is in the weights. size: of those whose rows are, where it can change within a world."""
        self._write("applied", step, size or self._size, rows)

    def _write(self, kind: str, step: int, size: int, rows: torch.Tensor) -> None:
        line: dict[str, Any] = {"kind": kind, "at": time.time(), "world": self._world, "step": step}
        self._file.write(json.dumps({**line, "size": size, "rows": rows.tolist()}) + "\n")


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, save: Callable[[int], object]
) -> None:
    """All steps after `step`, in a world of torch.distributed; `save` is called with every CHECKPOINT_STEPS-th one. The
    global batch stays when the world shrinks; rows of the epoch that a checkpoint has behind it are skipped."""
    world = [time.time_ns()]
    dist.broadcast_object_list(world)
    ledger, share = Ledger(world[0], dist.get_world_size()), BATCH // dist.get_world_size()
    table = open_table()
    sampler = DistributedSampler(table, seed=SEED)
    epoch_steps = len(table) // BATCH
    while step < epoch_steps * EPOCHS:
        sampler.set_epoch(step // epoch_steps)
        rest = list(sampler)[step % epoch_steps * share :]
        for rows, x, y in DataLoader(table, batch_size=share, sampler=rest):
            ledger.begin(step + 1, rows)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            ledger.apply(step, rows)
            if step % CHECKPOINT_STEPS == 0:
                save(step)
