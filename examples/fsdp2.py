"""FSDP2 that loses a worker in the middle of a step, and continues with that step.

    python examples/fsdp2.py

No worker has the whole model: `fully_shard` divides parameters and optimizer state over all of them. `build` makes
them anew in each world; each shard has a copy on another worker, on another host where there are several. In the first
world, rank 1 kills itself while the gradients of a step are exchanged.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Any

import torch
from pyspark.sql import SparkSession
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic import Rows
from spark_elastic.torch.fsdp import FSDPState

EPOCHS = 4
BATCH_SIZE = 64  # rows of a step over all workers
ROWS = 1000
LOST_AT = 20  # the step in which a worker dies


def build(state: Any) -> dict[str, Any]:
    """The model and its optimizer in a new world."""
    init_process_group()
    torch.manual_seed(1)  # all workers begin with the same weights
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def train(rows: Rows) -> None:
    hvd.init()
    loader = hvd.elastic.ElasticDataLoader(rows, BATCH_SIZE)
    first_size = hvd.size()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < EPOCHS:
            for batch in loader:
                state.optimizer.zero_grad()
                loss = nn.functional.mse_loss(state.model(batch["x"])[:, 0], batch["y"]) * loader.loss_weight
                if state.step == LOST_AT and hvd.size() == first_size > 1 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                state.optimizer.step()
                state.seen.extend(hvd.allgather(batch["id"]).tolist())
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
    loop(FSDPState(build, loader=loader, **values))


def print_cost(state: Any) -> None:
    """What the change of the world cost, as rank 0 of the new one sees it."""
    if hvd.rank() == 0:
        seconds = time.time() - state.time
        print(
            f"{state.size} workers became {hvd.size()}: step {state.step} came {seconds:.2f} s after the one before"
        )


def write_table(folder: str) -> Rows:
    """Rows of a DataFrame, in files that all workers read."""
    spark = SparkSession.builder.master("local[3]").getOrCreate()
    numbers = "transform(sequence(1, 8), k -> cast((pmod(hash(id, k), 2001) - 1000) / 500 as float))"
    df = spark.range(ROWS).selectExpr("id", f"{numbers} as x")
    return Rows.from_dataframe(
        df.selectExpr("*", "aggregate(x, cast(0 as float), (a, b) -> a + b) as y"), folder
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:  # on a cluster, a folder that all hosts see
        spark_elastic.run(train, (write_table(store),), num_workers=3, min_workers=1)
