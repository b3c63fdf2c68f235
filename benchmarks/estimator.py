"""How fast does the estimator train, against a plain torch loop in one process over the same Parquet files?

    python benchmarks/estimator.py --json benchmarks/results/estimator.json

A table of a vector of 50 numbers and a label, in a Spark session of this machine that is warm: a first fit has left a
fork server in each slot's process, from which later workers are forked (its own seconds outside of training are given).
It ends after a minute without a fit: with the large net, whose peers run for longer, workers start without it.
Ours: `fit` with two workers of one thread each. Peer: one process, the same rows a step, batches by pyarrow in the
files' order, with one and with two torch threads; the better of the two counts. They take turns; medians over the
rounds. rows/s: while a world trained, the plain loop's from its first batch to its last step. Beside it the seconds of
`fit` by phase, and what two plain loops reach side by side that share the rows and exchange nothing, or sum one flat
gradient a step by our engine and do nothing else: the bounds of training in parallel here; and what they reach as two
workers of torch's DistributedDataParallel (over Gloo), the other peer. Beside the start of our workers stands that of
two plain processes: Python, torch, the first batch and the first step.
On two cores a round takes half a minute with the small net and three minutes with the large one; `--nets` names one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow.parquet as pq
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.parts.ranks import make_exchange
from benchmarks.parts.report import Row, finish, parser
from elastic_collectives import Endpoint, connect
from spark_elastic import ElasticTorchEstimator
from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes.materialize import WriteOptions, materialize

KEY = b"a benchmark's key"
WORKERS, WIDTH = 2, 50
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
    def name(self) -> str:
        parameters = sum(p.numel() for p in self.build().parameters())
        return f"MLP of {parameters:,} parameters"


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


def train_plain(pipe: Connection, case: Case, threads: int, part: int, parts: int, sums: str) -> None:
    """Send the rows per second of all epochs, begun when asked to.

    Args:
        sums: how the parts sum their gradients: "" (not at all), the name of a new file where torch's
            DistributedDataParallel meets, or "engine": one call of our engine for one flat gradient, and nothing else.
    """
    torch.set_num_threads(threads)
    model = case.build()
    group, flat = None, torch.zeros(sum(p.numel() for p in model.parameters()))
    if sums == "engine":
        end = Endpoint(KEY)
        group = connect(end, part, parts, (1, 1), make_exchange(pipe), local_ranks=range(parts))
        flat = torch.from_numpy(group.buffer(4 * len(flat))).view(torch.float32)
    elif sums:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{sums}", rank=part, world_size=parts
        )
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun = 0
    for parameter in model.parameters() if group is not None else ():
        parameter.grad = flat[begun : begun + parameter.numel()].view(parameter.shape)
        begun += parameter.numel()

    def take_step(x: torch.Tensor, y: torch.Tensor) -> None:
        if group is None:
            optimizer.zero_grad()
        else:
            flat.zero_()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if group is not None:
            group.allreduce(flat.numpy(), scale=(1.0, 1.0 / parts))
        optimizer.step()

    for x, y in batches(case, part, parts):  # touches everything once, outside of rows/s
        take_step(x, y)
        break
    pipe.send("ready")
    pipe.recv()
    begin, rows = time.perf_counter(), 0
    for _ in range(case.epochs):
        for x, y in batches(case, part, parts):
            take_step(x, y)
            rows += len(y)
    pipe.send(rows / (time.perf_counter() - begin))
    if group is not None:
        group.close()
        end.close()
    elif sums:
        torch.distributed.destroy_process_group()


def measure_plain_loop(case: Case, threads: int, processes: int = 1, sums: str = "") -> tuple[float, float]:
    """(rows per second of all processes together, each with its part of the rows; seconds until all have begun)."""
    spawn = get_context("spawn")
    pipes, started = [], []
    begin = time.perf_counter()
    for part in range(processes):
        ours, theirs = spawn.Pipe()
        started.append(spawn.Process(target=train_plain, args=(theirs, case, threads, part, processes, sums)))
        started[-1].start()
        theirs.close()
        pipes.append(ours)
    if sums == "engine":
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
    for pipe in pipes:
        pipe.recv()
    ready = time.perf_counter() - begin
    for pipe in pipes:
        pipe.send("go")
    found = sum(pipe.recv() for pipe in pipes)
    for process, pipe in zip(started, pipes, strict=True):
        process.join()
        pipe.close()
    return found, ready


def measure_fit(case: Case, df: DataFrame, store: str) -> dict[str, float]:
    """Rows per second, and seconds by phase."""
    model = case.build()
    estimator = ElasticTorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=case.batch,
        epochs=case.epochs,
        num_workers=WORKERS,
        store=store,
        verbose=0,
    )
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


def check_files(case: Case) -> None:
    """Raises ValueError if workers that exchange something would take other numbers of steps."""
    if len({pq.read_metadata(name).num_rows for name in case.files}) > 1:
        raise ValueError(
            "workers that exchange gradients need as many steps each: let the files have as many rows"
        )


def measure_ddp(case: Case) -> float:
    """Rows per second of two workers of torch's own data parallelism."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_plain_loop(case, 1, WORKERS, f"{folder}/meet")[0]


def measure(case: Case, df: DataFrame, store: str, rounds: int) -> list[Row]:
    fits: list[dict[str, float]] = []
    parallel: list[float] = []
    summed: list[float] = []
    bounds: list[tuple[float, float]] = []
    check_files(case)
    peers: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        fits.append(measure_fit(case, df, store))
        for threads, found in peers.items():
            found.append(measure_plain_loop(case, threads)[0])
        bounds.append(measure_plain_loop(case, 1, WORKERS))
        summed.append(measure_plain_loop(case, 1, WORKERS, "engine")[0])
        parallel.append(measure_ddp(case))
    medians = {key: statistics.median(fit[key] for fit in fits) for key in fits[0]}
    best = max(statistics.median(found) for found in peers.values())
    bound, ready = (statistics.median(numbers) for numbers in zip(*bounds, strict=True))
    trained = medians.pop("rows/s")
    rows = [
        Row(f"{case.name}: training", trained, best, "rows/s"),
        Row(
            f"{case.name}: training, against DistributedDataParallel",
            trained,
            statistics.median(parallel),
            "rows/s",
        ),
        Row(f"{case.name}: {WORKERS} plain loops that exchange nothing", bound, best, "rows/s"),
        Row(
            f"{case.name}: {WORKERS} plain loops that sum one flat gradient a step",
            statistics.median(summed),
            best,
            "rows/s",
        ),
        Row(f"{case.name}: workers start", medians.pop("workers start"), ready, "s"),
    ]
    return rows + [Row(f"{case.name}: {phase}", seconds, None, "s") for phase, seconds in medians.items()]


def main() -> None:
    made = parser("Training speed of the estimator beside a plain loop's, and the seconds of a fit by phase.")
    made.add_argument("--rows", type=int, default=200_000)
    made.add_argument("--batch", type=int, default=256)
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    arguments = made.parse_args()
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    spark = SparkSession.builder.master(f"local[{WORKERS}]").config(map=settings).getOrCreate()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        df = table(spark, arguments.rows)
        written = Store.open(str(Path(folder) / "plain"))
        manifest, _ = materialize(df, ["x", "y"], written, WriteOptions(row_order="table"))
        files = tuple(written.path(name) for name in manifest.files)
        store = str(Path(folder) / "fits")
        first = measure_fit(Case(NETS["small"], arguments.rows, arguments.batch, 1, files), df, store)
        rows.append(
            Row("the session's first fit, outside of training", first["fit outside of training"], None, "s")
        )
        for net in arguments.nets:
            case = Case(NETS[net], arguments.rows, arguments.batch, arguments.epochs, files)
            rows += measure(case, df, store, arguments.rounds)
    spark.stop()
    finish("estimator", rows, arguments.json)


if __name__ == "__main__":
    main()
