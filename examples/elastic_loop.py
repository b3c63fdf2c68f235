"""A training loop written by hand, made elastic by a state and a decorator, on Spark or on this machine alone.

    python examples/elastic_loop.py                          # on a local SparkSession
    spark-submit examples/elastic_loop.py                    # on the session's own cluster
    spark-elastic-run -np 2 --min-np 1 python examples/elastic_loop.py

Scripts written for Horovod look the same but for the import of `hvd`. Workers may join, leave and die at any time:
after a loss training goes back to the last commit, after a planned change it continues from where it is.
"""

from __future__ import annotations

import os
import sys
from typing import Any

EPOCHS = 3
BATCH_SIZE = 64  # rows of a step over all workers


def train(epochs: int) -> float:
    """On every worker; the loss of the last epoch."""
    import torch
    from torch import nn

    import spark_elastic.torch as hvd

    hvd.init()
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(1000, 8, generator=drawn)
    targets = inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(1000, 1, generator=drawn)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    loader = hvd.elastic.ElasticDataLoader(dataset, BATCH_SIZE)

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def loop(state: Any) -> float:
        while state.epoch < epochs:
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y) * loader.loss_weight
                loss.backward()
                optimizer.step()
                state.loss = float(hvd.allreduce(loss.detach()))
                state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {state.loss:.4f} on {hvd.size()} workers", flush=True)
            state.epoch += 1
            state.commit()
        return float(state.loss)

    return loop(hvd.elastic.TorchState(model, optimizer, loader=loader, epoch=0, loss=0.0))


def main() -> None:
    from pyspark.sql import SparkSession

    import spark_elastic

    builder = SparkSession.builder.appName("elastic_loop")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # not by spark-submit, which names the cluster
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master("local[2]")
    spark = builder.getOrCreate()
    try:
        print(spark_elastic.run(train, (EPOCHS,), num_workers=2, min_workers=1))
    finally:
        spark.stop()


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by spark-elastic-run
        train(EPOCHS)
    else:
        main()
