"""A fit on hosts that share nothing but an S3 bucket, for spark-submit: tells how it goes, then its verdict.

    spark-submit host_job.py WORKERS                      # {"page": url}, {"world": size, ...} ..., {"verdict": ...}
    spark-submit host_job.py WORKERS lease=5 epochs=100   # in place of 4 and 60
    spark-submit host_job.py WORKERS '{"store": ...}' ... # for each: {"refused": sentence, "seconds": ...}

Standard output has these JSON objects, one a line, each with "wall", the time. Steps in workers take their time as
long as their host has no file `over` in its folder for temporary files. Settings as JSON are those of an estimator that
must refuse to start.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import SparkSession

from spark_elastic import Rows
from spark_elastic.errors import ElasticError
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.handwritten.torch_state import ElasticDataLoader
from spark_elastic.torch import progress
from tests.component.torch.job import ledger_of
from tests.spark import estimators

STORE, TABLE = "s3://jobs/store", "s3://jobs/table"
ROWS, BATCH, EPOCHS = 240, 48, 60  # five steps an epoch, whatever the world's size


class SlowNet(estimators.Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if progress() is not None and not Path(tempfile.gettempdir(), "over").exists():
            time.sleep(0.2)
        return super().forward(x)


class StatusPageHandler(logging.Handler):
    """Tells where the status page is."""

    def emit(self, record: logging.LogRecord) -> None:
        for url in re.findall(r"http://\S+/status/\S+", record.getMessage()):
            say(page=url)


def say(**told: object) -> None:
    sys.stdout.write(json.dumps(told | {"wall": time.time()}) + "\n")
    sys.stdout.flush()


def follow(numbers: Mapping[str, Any]) -> None:
    say(**{name: numbers[name] for name in ("world", "epoch", "step")})


def write_rows() -> None:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 2, dtype=torch.float64, generator=draw)
    y = x @ torch.tensor([2.0, -1.0], dtype=torch.float64) + 0.5
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdirs("jobs", exist_ok=True)
    with filesystem.open("jobs/table/part.parquet", "wb") as file:
        pq.write_table(pa.table({"x": x.tolist(), "y": y.tolist()}), file, row_group_size=40)


def fit(workers: int, run_id: str, **settings: Any) -> ElasticTorchModel:
    net = SlowNet()
    values: dict[str, Any] = {
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        "batch_size": BATCH // workers,
        "epochs": EPOCHS,
        "num_workers": workers,
        "min_workers": 1,
        "run_id": run_id,
        "seed": 3,
        "ship": True,
        "lease": 4.0,
    }
    return estimators.estimator(STORE, model=net, **(values | settings)).fit_on_parquet(TABLE)


def train_undisturbed(epochs: int) -> list[torch.Tensor]:
    """What a plain loop over the same steps makes of the model."""
    net = estimators.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = ElasticDataLoader(Rows.from_parquet(TABLE), BATCH, seed=3)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(batch["x"]), batch["y"]).backward()
            optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def are_rows_exact(run_id: str, epochs: int) -> bool:
    """Each row entered one applied step of each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        fsspec.filesystem("s3").get(f"{STORE}/runs/{run_id}/ledger/", folder, recursive=True)
        once = Counter((epoch, row) for epoch in range(epochs) for row in range(ROWS))
        return ledger_of(Path(folder)) == once


def main() -> None:
    workers = int(sys.argv[1])
    for module in (estimators, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)  # executors have no tests
    logger = logging.getLogger("spark_elastic")
    logger.setLevel(logging.INFO)
    logger.addHandler(StatusPageHandler())
    spark = SparkSession.builder.appName("hosts").getOrCreate()
    write_rows()
    try:
        refused = [json.loads(word) for word in sys.argv[2:] if word.startswith("{")]
        for settings in refused:
            began = time.monotonic()
            try:
                fit(workers, "refused", **settings)
            except ElasticError as error:
                say(refused=str(error), seconds=time.monotonic() - began)
        if not refused:
            train(workers)
    finally:
        spark.stop()


def train(workers: int) -> None:
    given = dict(word.split("=") for word in sys.argv[2:] if "=" in word)
    epochs, lease = int(given.get("epochs", EPOCHS)), float(given.get("lease", 4.0))
    model = fit(workers, "disturbed", ledger=True, on_progress=follow, lease=lease, epochs=epochs)
    verdict = {
        "rows exact": are_rows_exact("disturbed", epochs),
        "weights exact": estimators.is_close(model, train_undisturbed(epochs)),
        "worlds": [[world.size, world.reason] for world in model.summary.worlds],
        "steps lost": model.summary.report.steps_lost,
    }
    say(verdict=verdict)


if __name__ == "__main__":
    main()
