"""Contrastive embeddings: two towers whose loss compares all rows of a step, for any number of workers.

    python examples/embeddings.py

Each row is a pair, two noisy views of one point. `loss_scope="step"` shows InfoNCE all pairs of a step, wherever their
outputs were computed: the weights do not depend on how many workers there are. In the first world, rank 1 kills itself
in a step.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Any

import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.torch.callbacks import Callback

EPOCHS, WORKERS = 4, 3
BATCH_SIZE = 32  # pairs of a step per worker, of which there are WORKERS at the start
PAIRS = 1536
LOST_AT = 10  # the step of the first epoch in which a worker dies


class Towers(nn.Module):
    """An encoder of each view; real ones are a vision and a text model."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.right = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        normalize = nn.functional.normalize
        return {"left": normalize(self.left(left)), "right": normalize(self.right(right))}


def compare(output: dict[str, torch.Tensor], pair: torch.Tensor) -> torch.Tensor:
    """InfoNCE: each view is to find its partner among those of all rows of the step."""
    likeness = output["left"] @ output["right"].T / 0.1
    partners = torch.arange(len(likeness))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(likeness, partners) + cross_entropy(likeness.T, partners)) / 2


class Loss(Callback):
    """Loses a worker, and says what that cost."""

    def __init__(self) -> None:
        self._first_size = self._size = 0
        self._time = time.time()  # of the newest step

    def on_step_begin(self, training: Any, epoch: int, step: int) -> None:
        self._first_size = self._first_size or training.size
        if (epoch, step) == (1, LOST_AT) and training.size == self._first_size > 1 and training.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._size and training.size != self._size and training.rank == 0:
            seconds = time.time() - self._time
            print(f"{self._size} workers became {training.size} within {seconds:.2f} s", flush=True)
        self._size, self._time = training.size, time.time()


def make_pairs(spark: SparkSession) -> DataFrame:
    point, noise = "pmod(hash(id, k), 201)", "pmod(hash(id, k, {}), 41)"
    view = f"transform(sequence(1, 16), k -> cast(({point} + {noise}) / 121 - 1 as float))"
    return spark.range(PAIRS).selectExpr(
        f"{view.format(1)} as left", f"{view.format(2)} as right", "cast(id as float) as pair"
    )


def main(spark: SparkSession, store: str) -> None:
    model = ElasticTorchEstimator(
        model=Towers(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.003),
        loss=compare,
        loss_scope="step",
        feature_cols=["left", "right"],
        label_cols=["pair"],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        num_workers=WORKERS,
        min_workers=1,
        callbacks=[Loss()],
        store=store,
    ).fit(make_pairs(spark))
    print(model.summary.report, flush=True)
    losses = [entry["loss"] for entry in model.history]
    print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)


if __name__ == "__main__":
    session = SparkSession.builder.master(f"local[{WORKERS}]").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:  # on a cluster, a folder that all hosts see
        main(session, folder)
