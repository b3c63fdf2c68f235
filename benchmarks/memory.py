"""How much memory does a worker take on data far larger than it, and what is gained by not writing them again?

Parquet of 256 float32 a row, once in row groups of 64 MB, once in one row group, trained on by `fit_on_parquet` with
two workers in a Spark session of this machine. A worker is its slot task (a Python worker of Spark), the training
process, the warm spare and the fork server of both; each second their proportional set sizes (PSS) are added up, shared
memory included. A figure is the peak of the worker that had most. Beside it, the bound. The file in ordinary row groups
is then trained on once more as a DataFrame that `fit` writes to the store first (`materialize="always"`): the peer.
What is outside of training is nearly all before its first step; a short fit has warmed the session.

`measure_loops`: an epoch of a loop of DDP on `Rows` of the same kind, by three workers; in row groups of 64 MB, and of
4 MB, as `Rows.from_dataframe` writes them. The peer is the bound.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import spark_elastic
from benchmarks.parts.budget import within_budget
from benchmarks.parts.report import Row
from benchmarks.parts.rows_loop import train
from benchmarks.parts.spark import make_estimator, open_session
from spark_elastic import ElasticTorchEstimator, ElasticTorchModel, Rows

WORKERS, WIDTH, BATCH = 2, 256, 512
SERVER = "spark_elastic.worker.fork_server"
MAINS = {"spark_elastic.worker.entry", SERVER}
GROUP_BYTES = 64 << 20
BOUND = 1 << 30
LOOP_WORKERS, LOOP_BATCH, LOOP_BOUND = 3, 3072, 700 << 20
LINKS = 16  # files of a loop's table, which share their bytes on the disk
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


@contextmanager
def sample_peaks() -> Iterator[dict[int, int]]:
    """Bytes of each worker at its peak, by the process of its slot task; sampled each second."""
    peaks: dict[int, int] = {}
    over = threading.Event()

    def sample() -> None:
        while not over.wait(1.0):
            for slot, total in _workers().items():
                peaks[slot] = max(total, peaks.get(slot, 0))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _workers() -> dict[int, int]:
    """PSS of slot task, training process, spare and fork server, by slot task."""
    totals: dict[int, int] = defaultdict(int)
    for process in psutil.Process().children(recursive=True):
        try:
            if MAINS.intersection(process.cmdline()):
                slot = psutil.Process(_find_slot(process))
                totals[slot.pid] = totals[slot.pid] or slot.memory_full_info().pss
                totals[slot.pid] += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended meanwhile
    return totals


def _find_slot(process: psutil.Process) -> int:
    """The slot task of a worker or a fork server: the parent, or whom a fork of another slot's server serves: it has a
    pidfd of that process."""
    parent = psutil.Process(process.ppid())
    if SERVER not in parent.cmdline():
        return parent.pid
    if SERVER not in process.cmdline():
        return _find_slot(parent)
    places = Path(f"/proc/{process.pid}/fdinfo").iterdir()
    held = {int(pid) for place in places for pid in re.findall(r"^Pid:\s*(\d+)", place.read_text(), re.M)}
    return next(pid for pid in held if psutil.Process(pid).ppid() != process.pid)


@dataclass(frozen=True)
class Measured:
    """A fit."""

    peak: float  # of the worker that had most, in megabytes
    training: float  # seconds
    outside: float  # likewise


def measure_fit(folder: Path, fit: Callable[[ElasticTorchEstimator], ElasticTorchModel]) -> Measured:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    flat = torch.nn.Sequential(model, torch.nn.Flatten(0))
    estimator = make_estimator(flat, BATCH, WORKERS, str(folder / "store"))
    begin = time.monotonic()
    with sample_peaks() as peaks:
        fitted = fit(estimator)
        took = time.monotonic() - begin
    training = fitted.summary.report.phases["training"]
    return Measured(max(peaks.values(), default=0) / MEGABYTE, training, took - training)


def measure(megabytes: int = 4096, single: int = 1024) -> list[Row]:
    """megabytes: of the file in ordinary row groups. single: of the file of one row group."""
    with tempfile.TemporaryDirectory() as place, open_session(WORKERS) as spark:
        folder = Path(place)
        data, alone, short = (str(folder / f"{name}.parquet") for name in ("rows", "single", "short"))
        write(Path(short), 16 * MEGABYTE, 4 * MEGABYTE)
        measure_fit(folder, lambda estimator: estimator.fit_on_parquet(short))
        write(Path(data), megabytes * MEGABYTE, GROUP_BYTES)
        in_place = measure_fit(folder, lambda estimator: estimator.fit_on_parquet(data))
        table = spark.read.parquet(data)
        written = measure_fit(folder, lambda estimator: estimator.setMaterialize("always").fit(table))
        case, count = f"{megabytes:,} MB in row groups of 64 MB", table.count()
        rows = [
            Row(f"{case}: peak of a worker", in_place.peak, BOUND / MEGABYTE, "MB"),
            Row(f"{case}: peak of a worker, beside the written copy", in_place.peak, written.peak, "MB"),
            Row(f"{case}: training", count / in_place.training, count / written.training, "rows/s"),
            Row(f"{case}: outside of training", in_place.outside, written.outside, "s"),
        ]
        shutil.rmtree(folder / "store")
        write(Path(alone), single * MEGABYTE, single * MEGABYTE)
        one = measure_fit(folder, lambda estimator: estimator.fit_on_parquet(alone))
        case = f"{single:,} MB in one row group"
        rows.append(Row(f"{case}: peak of a worker", one.peak, BOUND / MEGABYTE, "MB"))
        rows.append(Row(f"{case}: training", one.training, None, "s"))
    return rows


def measure_loops(megabytes: int = 10_240, groups: tuple[int, ...] = (64, 4)) -> list[Row]:
    """groups: megabytes of a row group."""
    found = []
    for group in within_budget(groups, "MB of a row group:"):
        with tempfile.TemporaryDirectory() as place, open_session(LOOP_WORKERS):
            write(Path(place, "0.parquet"), megabytes * MEGABYTE // LINKS, group * MEGABYTE)
            for number in range(1, LINKS):
                os.link(Path(place, "0.parquet"), Path(place, f"{number}.parquet"))
            rows = Rows.from_parquet(place)
            with sample_peaks() as peaks:
                seconds = spark_elastic.run(train, (rows, LOOP_BATCH, WIDTH), num_workers=LOOP_WORKERS)
        case = f"{megabytes:,} MB in row groups of {group} MB: a loop of DDP"
        peak = max(peaks.values()) / MEGABYTE
        found.append(Row(f"{case}: peak of a worker", peak, LOOP_BOUND / MEGABYTE, "MB"))
        found.append(Row(f"{case}: training", rows.count / max(seconds), None, "rows/s"))
    return found
