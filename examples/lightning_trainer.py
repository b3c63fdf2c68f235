"""Lightning's Trainer that loses a worker in the middle of a step, and continues with that step.

    python examples/lightning_trainer.py

The module is plain Lightning. The strategy and the loader make its training elastic. In the first world, rank 1 kills
itself before the gradients of a step are exchanged.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
from pyspark.sql import SparkSession
from torch import nn

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic import Rows
from spark_elastic.torch.lightning import ElasticStrategy

EPOCHS = 4
BATCH_SIZE = 64  # rows of a step over all workers
ROWS = 1000
LOST_AT = 20  # the step in which a worker dies


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch["x"])[:, 0], batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Loss(pl.Callback):
    """Loses a worker, and says what that cost."""

    def __init__(self) -> None:
        self.first_size = hvd.size()
        self.size, self.time = hvd.size(), time.time()  # at the newest step

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == LOST_AT and hvd.size() == self.first_size > 1 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        if hvd.size() != self.size and hvd.rank() == 0:
            seconds = time.time() - self.time
            print(
                f"{self.size} workers became {hvd.size()}: step {trainer.global_step} came {seconds:.2f} s after the "
                "one before",
                flush=True,
            )
        self.size, self.time = hvd.size(), time.time()


def train(rows: Rows) -> None:
    hvd.init()
    pl.seed_everything(1)
    loader = hvd.elastic.ElasticDataLoader(rows, BATCH_SIZE)
    trainer = pl.Trainer(
        strategy=ElasticStrategy(),
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[Loss()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module, loader)
    if hvd.rank() == 0:
        with torch.no_grad():
            loss = float(module.training_step(next(iter(torch.utils.data.DataLoader(rows.dataset(), ROWS)))))
        print(f"{trainer.global_step} steps; the loss over all rows is {loss:.3f}", flush=True)


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
