"""A loop of DDP on `Rows`, in a module that imports no more than such a program does: workers import it, too."""

from __future__ import annotations

import time

import torch

import spark_elastic.torch as hvd
from spark_elastic import Rows


def train(rows: Rows, batch: int, width: int) -> float:
    """An epoch. Returns its seconds. batch: rows of a step over all ranks. width: of the column x."""
    model = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = hvd.elastic.ElasticDataLoader(rows, batch)

    @hvd.elastic.run
    def loop(state: hvd.elastic.TorchState) -> float:
        torch.distributed.init_process_group()
        ddp, begin = torch.nn.parallel.DistributedDataParallel(model), time.monotonic()
        for features in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(ddp(features["x"])[:, 0], features["y"])
            (loss * loader.loss_weight).backward()
            optimizer.step()
            if loader.step % 64 == 0:
                state.commit()
        return time.monotonic() - begin

    seconds: float = loop(hvd.elastic.TorchState(model, optimizer, loader=loader))
    return seconds
