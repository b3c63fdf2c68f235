"""How much memory does a worker take on data far larger than it, and what is gained by not writing them again?

    python benchmarks/memory.py --json benchmarks/results/memory.json

Parquet of 256 float32 a row, once in row groups of 64 MB, once in one row group, trained on by `fit_on_parquet` with
two workers in a Spark session of this machine. A worker is its slot task (a Python worker of Spark), the training
process, the warm spare and the fork server of both; each second their proportional set sizes (PSS) are added up, shared
memory included. A figure is the peak of the worker that had most. Beside it, the bound. The file in ordinary row groups
is then trained on once more as a DataFrame that `fit` writes to the store first (`materialize="always"`): the peer.
What is outside of training is nearly all before its first step; a short fit has warmed the session.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import SparkSession

from benchmarks.parts.report import Row, finish, parser
from spark_elastic import ElasticTorchEstimator, ElasticTorchModel

WORKERS, WIDTH, BATCH = 2, 256, 512
MAINS = {"spark_elastic.worker.entry", "spark_elastic.worker.fork_server"}
GROUP_BYTES = 64 << 20
BOUND = 1 << 30
MEGABYTE = 1 << 20


def write(path: Path, size: int, group: int) -> None:
    """About `size` bytes of numbers that do not compress, in row groups of `group` bytes."""
    rng, row = np.random.default_rng(1), 4 * WIDTH
    schema = pa.schema([("x", pa.list_(pa.float32(), WIDTH)), ("y", pa.float32())])
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for first in range(0, size, group):
            rows = min(group, size - first) // row
            x = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(rows * WIDTH, np.float32)), WIDTH)
            table = pa.Table.from_arrays([x, pa.array(rng.random(rows, np.float32))], schema=schema)
            writer.write_table(table, row_group_size=rows)


class MemorySampler:
    """Samples each second; `peaks`: bytes of each worker, by the process of its slot task."""

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self.samples = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(1.0):
            self.samples += 1
            for slot, total in _workers().items():
                self.peaks[slot] = max(total, self.peaks.get(slot, 0))


def _workers() -> dict[int, int]:
    """PSS of slot task, training process, spare and fork server, by slot task."""
    totals: dict[int, int] = defaultdict(int)
    for process in psutil.Process().children(recursive=True):
        try:
            if MAINS.intersection(process.cmdline()):
                slot = process.parent()
                if slot is not None:
                    totals[slot.pid] = totals[slot.pid] or slot.memory_full_info().pss
                    totals[slot.pid] += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended meanwhile
    return totals


@dataclass(frozen=True)
class Measured:
    """A fit."""

    # Of the worker that had most, in megabytes.
    peak: float
    # Seconds.
    training: float
    outside: float


def measure(folder: Path, fit: Callable[[ElasticTorchEstimator], ElasticTorchModel]) -> Measured:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    estimator = ElasticTorchEstimator(
        model=torch.nn.Sequential(model, torch.nn.Flatten(0)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH,
        num_workers=WORKERS,
        store=str(folder / "store"),
        verbose=0,
    )
    begin = time.monotonic()
    with MemorySampler() as watch:
        fitted = fit(estimator)
        took = time.monotonic() - begin
    training = fitted.summary.report.phases["training"]
    return Measured(max(watch.peaks.values(), default=0) / MEGABYTE, training, took - training)


def main() -> None:
    made = parser("Peak memory of a worker while it trains on data larger than memory.")
    made.add_argument("--megabytes", type=int, default=4096, help="of the file in ordinary row groups")
    made.add_argument("--single", type=int, default=1024, help="megabytes of the file of one row group")
    arguments = made.parse_args()
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    spark = SparkSession.builder.master(f"local[{WORKERS}]").config(map=settings).getOrCreate()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data, single, short = (str(folder / f"{name}.parquet") for name in ("rows", "single", "short"))
        write(Path(short), 16 * MEGABYTE, 4 * MEGABYTE)
        measure(folder, lambda estimator: estimator.fit_on_parquet(short))
        write(Path(data), arguments.megabytes * MEGABYTE, GROUP_BYTES)
        in_place = measure(folder, lambda estimator: estimator.fit_on_parquet(data))
        table = spark.read.parquet(data)
        written = measure(folder, lambda estimator: estimator.setMaterialize("always").fit(table))
        case, count = f"{arguments.megabytes:,} MB in row groups of 64 MB", table.count()
        rows += [
            Row(f"{case}: peak of a worker", in_place.peak, BOUND / MEGABYTE, "MB"),
            Row(f"{case}: peak of a worker, beside the written copy", in_place.peak, written.peak, "MB"),
            Row(f"{case}: training", count / in_place.training, count / written.training, "rows/s"),
            Row(f"{case}: outside of training", in_place.outside, written.outside, "s"),
        ]
        shutil.rmtree(folder / "store")
        write(Path(single), arguments.single * MEGABYTE, arguments.single * MEGABYTE)
        alone = measure(folder, lambda estimator: estimator.fit_on_parquet(single))
        case = f"{arguments.single:,} MB in one row group"
        rows += [
            Row(f"{case}: peak of a worker", alone.peak, BOUND / MEGABYTE, "MB"),
            Row(f"{case}: training", alone.training, None, "s"),
        ]
    spark.stop()
    finish("memory", rows, arguments.json)


if __name__ == "__main__":
    main()
