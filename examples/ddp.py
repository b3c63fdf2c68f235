"""DistributedDataParallel that loses a worker in the middle of a step, and continues with that step.

    spark-elastic-run -np 3 --min-np 1 python examples/ddp.py

The loop is plain PyTorch: `init_process_group`, `DistributedDataParallel`, `backward`, `step`. The decorator, the state
and the loader make it elastic. In the first world, rank 1 kills itself while the gradients of a step are exchanged.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

import spark_elastic.torch as hvd

EPOCHS = 4
BATCH_SIZE = 64  # rows of a step over all workers
ROWS = 1000
LOST_AT = 20  # the step in which a worker dies


def train() -> None:
    hvd.init()
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 8, generator=drawn)
    targets = inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=drawn)
    dataset = torch.utils.data.TensorDataset(torch.arange(ROWS), inputs, targets)
    loader = hvd.elastic.ElasticDataLoader(dataset, BATCH_SIZE)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first_size = hvd.size()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        init_process_group()  # of this world
        ddp = DistributedDataParallel(model)
        while state.epoch < EPOCHS:
            for rows, x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(ddp(x), y) * loader.loss_weight
                if state.step == LOST_AT and hvd.size() == first_size > 1 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                state.seen.extend(hvd.allgather(rows).tolist())
                state.step += 1
                if hvd.size() != state.size:
                    print_cost(state)
                state.size, state.time = hvd.size(), time.time()
                state.commit()
            state.epoch += 1
        destroy_process_group()
        if hvd.rank() == 0:
            exact = sorted(state.seen) == sorted(list(range(ROWS)) * EPOCHS)
            print(f"{state.step} steps; each row once per epoch: {exact}", flush=True)

    values = {"epoch": 0, "step": 0, "size": first_size, "time": time.time(), "seen": []}
    loop(hvd.elastic.TorchState(model, optimizer, loader=loader, **values))


def print_cost(state: Any) -> None:
    """What the change of the world cost, as rank 0 of the new one sees it."""
    if hvd.rank() == 0:
        seconds = time.time() - state.time
        print(
            f"{state.size} workers became {hvd.size()}: step {state.step} came {seconds:.2f} s after the one before"
        )


if __name__ == "__main__":
    train()
