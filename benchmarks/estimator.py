"""How fast does the estimator train, against a plain torch loop in one process over the same Parquet files?

A table of a vector of 50 numbers and a label, in a Spark session of this machine that is warm: a first fit has left a
fork server in each slot's process, from which later workers are forked (its own seconds outside of training are given).
It ends after a minute without a fit: with the large net, whose peers run for longer, workers start without it.
Ours: `fit` with two workers of one thread each. Peer: one process, the same rows a step, batches by pyarrow in the
files' order, with one and with two torch threads; the better of the two counts. They take turns; medians over the
rounds. rows/s: from the moment at which all have met until the last step, so that the first batch and the first step of
all are in it. Beside it the seconds of `fit` by phase, and what two plain loops reach side by side that share the rows
and exchange nothing, or sum one flat gradient a step by our engine and do nothing else: the bounds of training in
parallel here; and what they reach as two workers of torch's DistributedDataParallel (over Gloo), the other peer. With
the small net also a training of LONG times as many epochs, in which first batch and first step hardly count. Beside the
start of our workers stands that of two plain processes: Python, torch, the model, and the group that they make.
On two cores a round takes a minute with the small net and three minutes with the large one; `nets` names them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow.parquet as pq
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.parts.budget import within_budget
from benchmarks.parts.ranks import compare_figures, join_group, run_ranks
from benchmarks.parts.report import Row
from benchmarks.parts.spark import make_estimator, open_session
from elastic_collectives import Group
from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes.materialize import WriteOptions, materialize

WORKERS, WIDTH = 2, 50
LONG = 4  # times as many epochs, of a net whose whole training takes a second, so that hardly more than steps is seen
NETS = {"small": (64,), "large": (1000, 1000)}


@dataclass(frozen=True)
class Case:
    """One net on one table. files: the table as `materialize` writes it in its own order, one for each partition."""

    hidden: tuple[int, ...]
    rows: int
    batch: int
    epochs: int
    files: tuple[str, ...]

    def build(self) -> torch.nn.Module:
        torch.manual_seed(1)
        sizes = (WIDTH, *self.hidden)
        layers: list[torch.nn.Module] = []
        for before, after in zip(sizes, self.hidden, strict=False):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], 1), torch.nn.Flatten(0))

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.build().parameters())

    @property
    def name(self) -> str:
        return f"MLP of {self.parameters:,} parameters"


def table(spark: SparkSession, rows: int) -> DataFrame:
    """`x`: a vector of 50 numbers, `y`: a number."""
    numbers = F.array(*(F.rand(seed) for seed in range(WIDTH))).alias("a")
    made = spark.range(rows, numPartitions=WORKERS).select(numbers)
    return made.select(array_to_vector("a").alias("x"), F.element_at("a", 1).cast("float").alias("y")).cache()


def batches(case: Case, part: int, parts: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One epoch of a part of the files, in batches of its part of a step's rows."""
    for name in case.files[part::parts]:
        with pq.ParquetFile(name) as file:
            for batch in file.iter_batches(case.batch * WORKERS // parts):
                x = torch.from_numpy(batch.column("x").flatten().to_numpy(zero_copy_only=False).copy())
                yield x.view(-1, WIDTH), torch.from_numpy(batch.column("y").to_numpy().copy())


def train_plain(
    pipe: Connection, part: int, parts: int, case: Case, threads: int, sums: str, begun: float
) -> None:
    """Send (rows per second of all epochs, seconds from `begun` until all have met). sums: how the parts sum their
    gradients: not at all (""), in one call of our "engine", or by DDP, which meets in this new file."""
    torch.set_num_threads(threads)
    with join_group(pipe, part, parts) as group:
        take_step = make_step(case, sums, group)
        pipe.send("ready")
        pipe.recv()
        ready, begin, rows = time.monotonic() - begun, time.perf_counter(), 0
        for _ in range(case.epochs):
            for x, y in batches(case, part, parts):
                take_step(x, y)
                rows += len(y)
        pipe.send((rows / (time.perf_counter() - begin), ready))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_step(case: Case, sums: str, group: Group) -> Callable[[torch.Tensor, torch.Tensor], None]:
    model = case.build()
    flat = torch.from_numpy(group.buffer(4 * case.parameters)).view(torch.float32)
    if sums not in ("", "engine"):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{sums}", rank=group.rank, world_size=group.size
        )
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun = 0
    for parameter in model.parameters() if sums == "engine" else ():
        parameter.grad = flat[begun : begun + parameter.numel()].view(parameter.shape)
        begun += parameter.numel()

    def take_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=sums != "engine")
        torch.nn.functional.mse_loss(model(x), y).backward()
        if sums == "engine":
            group.allreduce(flat.numpy(), scale=(1.0, 1.0 / group.size))
        optimizer.step()

    return take_step


def measure_plain_loop(case: Case, threads: int, processes: int = 1, sums: str = "") -> tuple[float, float]:
    """(rows per second of all processes together, each with its part of the rows; seconds until all have begun)."""
    with tempfile.TemporaryDirectory() as folder:
        how = f"{folder}/meet" if sums == "DDP" else sums
        found = run_ranks(processes, train_plain, case, threads, how, time.monotonic(), go=True)
    return sum(speed for speed, _ in found), max(ready for _, ready in found)


def measure_fit(case: Case, df: DataFrame, store: str) -> dict[str, float]:
    """Rows per second, and seconds by phase."""
    estimator = make_estimator(case.build(), case.batch, WORKERS, store, case.epochs)
    summary = estimator.fit(df).summary
    phases = summary.report.phases
    training = phases["training"]
    return {
        "rows/s": case.rows * case.epochs / training,
        "training": training,
        "fit": summary.seconds,
        "fit outside of training": summary.seconds - training,
        "before workers are asked for, and after": summary.seconds - summary.report.seconds,
        "workers start": phases["start"],
        "closing": phases["closing"],
    }


def measure_case(case: Case, df: DataFrame, store: str, rounds: int) -> list[Row]:
    steps = {pq.read_metadata(name).num_rows for name in case.files}
    assert len(steps) == 1, "workers that exchange gradients need as many steps each"
    phases: list[str] = []

    def fit() -> list[float]:
        figures = measure_fit(case, df, store)
        phases[:] = figures
        return list(figures.values())

    contenders: dict[str, Callable[[], Sequence[float]]] = {
        "fit": fit,
        "one thread": lambda: measure_plain_loop(case, 1),
        "two threads": lambda: measure_plain_loop(case, 2),
        "alone": lambda: measure_plain_loop(case, 1, WORKERS),
        "summed": lambda: measure_plain_loop(case, 1, WORKERS, "engine"),
        "DDP": lambda: measure_plain_loop(case, 1, WORKERS, "DDP"),
    }
    long = replace(case, epochs=LONG * case.epochs)
    if case.hidden == NETS["small"]:
        contenders["long fit"] = lambda: [measure_fit(long, df, store)["rows/s"]]
        contenders["long loops"] = lambda: measure_plain_loop(long, 1, WORKERS, "engine")
    medians = compare_figures(contenders, rounds)
    fits = dict(zip(phases, medians["fit"], strict=True))
    best = max(medians["one thread"][0], medians["two threads"][0])
    (bound, ready), summed, trained = medians["alone"], medians["summed"][0], fits.pop("rows/s")
    loops = f"{case.name}: {WORKERS} plain loops that"
    against = "against loops that sum one flat gradient a step"
    rows = [
        Row(f"{case.name}: training", trained, best, "rows/s"),
        Row(f"{case.name}: training, against DistributedDataParallel", trained, medians["DDP"][0], "rows/s"),
        Row(f"{loops} exchange nothing", bound, best, "rows/s"),
        Row(f"{loops} sum one flat gradient a step", summed, best, "rows/s"),
        Row(f"{case.name}: training, {against}", trained, summed, "rows/s"),
        Row(f"{case.name}: workers start", fits.pop("workers start"), ready, "s"),
    ]
    if "long fit" in medians:
        name = f"{case.name}: training of {long.epochs} epochs, {against}"
        rows.append(Row(name, medians["long fit"][0], medians["long loops"][0], "rows/s"))
    return rows + [Row(f"{case.name}: {phase}", seconds, None, "s") for phase, seconds in fits.items()]


def measure(
    rows: int = 200_000,
    batch: int = 256,
    epochs: int = 3,
    rounds: int = 3,
    nets: tuple[str, ...] = tuple(NETS),
) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, open_session(WORKERS) as spark:
        df = table(spark, rows)
        written = Store.open(str(Path(folder) / "plain"))
        manifest, _ = materialize(df, ["x", "y"], written, WriteOptions(row_order="table"))
        files = tuple(written.path(name) for name in manifest.files)
        store = str(Path(folder) / "fits")
        first = measure_fit(Case(NETS["small"], rows, batch, 1, files), df, store)["fit outside of training"]
        found = [Row("the session's first fit, outside of training", first, None, "s")]
        for net in within_budget(nets, "net"):
            found += measure_case(Case(NETS[net], rows, batch, epochs, files), df, store, rounds)
    return found
