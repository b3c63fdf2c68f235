"""A Lightning forecaster on windows of the series in a table, which loses a worker in the middle of a step.

    python examples/forecaster.py

Spark cuts each series into windows; the module, a GRU, is plain Lightning. The strategy and the loader make its
training elastic. In the first world, rank 1 kills itself before the gradients of a step are exchanged.
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
BATCH_SIZE = 64  # windows of a step over all workers
SERIES, DAYS, SEEN, AHEAD = 20, 120, 28, 7
LOST_AT = 20  # the step in which a worker dies


class Forecaster(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.past = nn.GRU(1, 32, batch_first=True)
        self.ahead = nn.Linear(32, AHEAD)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """(windows, days) -> (windows, AHEAD)"""
        return self.ahead(self.past(seen[:, :, None])[1][0])

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self(batch["seen"]), batch["ahead"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.005)


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
    module = Forecaster()
    trainer.fit(module, hvd.elastic.ElasticDataLoader(rows, BATCH_SIZE))
    if hvd.rank() == 0:
        with torch.no_grad():
            windows = next(iter(torch.utils.data.DataLoader(rows.dataset(), len(rows.dataset()))))
            error = float((module(windows["seen"]) - windows["ahead"]).abs().mean())
        print(f"{trainer.global_step} steps; the mean error of {AHEAD} days is {error:.3f}", flush=True)


def write_windows(folder: str) -> Rows:
    """Each series' windows of SEEN days and the AHEAD that follow, as rows in files that all workers read."""
    spark = SparkSession.builder.master("local[3]").getOrCreate()
    sales = "cast(sin(2 * pi() * (day + series) / 7) + day / 60 as float)"
    table = spark.sql(
        f"select series, day, {sales} as sales from (select explode(sequence(1, {SERIES})) as series) "
        f"cross join (select explode(sequence(1, {DAYS})) as day)"
    )
    window = (
        f"over (partition by series order by day rows between current row and {SEEN + AHEAD - 1} following)"
    )
    windows = table.selectExpr("series", "day", f"collect_list(sales) {window} as days")
    complete = windows.where(f"size(days) = {SEEN + AHEAD}")
    return Rows.from_dataframe(
        complete.selectExpr(f"slice(days, 1, {SEEN}) as seen", f"slice(days, {SEEN + 1}, {AHEAD}) as ahead"),
        folder,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:  # on a cluster, a folder that all hosts see
        spark_elastic.run(train, (write_windows(store),), num_workers=3, min_workers=1)
