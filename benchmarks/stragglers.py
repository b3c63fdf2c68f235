"""What does a world reach in which one worker has a quarter of a core, against the most that its workers could?

    python benchmarks/stragglers.py --json benchmarks/results/stragglers.json

Two processes of one machine, each with one thread for arithmetic, run the estimator's training loop over the same
Parquet files: an MLP of a million parameters, 256 rows a worker and step. Rank 1 is in a control group with a quota of
25 % of a core (root needed; version 1 or 2). The bound: both train alone at the same time, each for itself, once with
256 rows a step and once with 512; a line through both times says how long each needs for any number of rows, and the
best division of 512 rows among the two, without an exchange, is what nobody can be quicker than. A second bound has the
exchange: what equal workers' steps take longer than one alone, and four times that for the one with the quota. Beside
them the same world with balance_rows=False, and a world without a quota with and without balancing, whose ratio is what
balancing costs on equal workers. A case is measured for `--seconds` after `--settle` seconds, in which the division is
found; cases take turns, and medians of the rounds count. Half a minute a case. On a busy machine let `--core 0.4
--period 20000` leave so much of a core to a whole worker, and a quarter of that to the other one: what the machine has
left over then decides less.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.parts.report import Row, finish, parser
from elastic_collectives import Endpoint, connect
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.decoding import read_footers
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import INITIAL_VERSION, START, Fence, Member, SlotId, WorkerId, World
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.spec import Rows, TrainSpec
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from spark_elastic.worker.context import WorkerContext, set_context
from spark_elastic.worker.program import WorkerHandle

KEY = b"a benchmark's key"
ROWS, WIDTH, HIDDEN, BATCH = 100_000, 50, 1000, 256
QUOTA = 0.25  # of a whole worker's part of a core


class TimeIsUp(Exception):
    """Ends a training."""


@dataclass(frozen=True)
class Case:
    """A world in which rank 1 may have a quota."""

    name: str
    balance_rows: bool
    quota: bool
    # Rows of a step where each rank trains alone, in a world of its own; 0: both are one world.
    alone: int = 0


CASES = (
    Case("each alone, 256 rows a step", False, quota=True, alone=BATCH),
    Case("each alone, 512 rows a step", False, quota=True, alone=2 * BATCH),
    Case("one worker with 25 % of a core", True, quota=True),
    Case("one worker with 25 % of a core, equal division", False, quota=True),
    Case("equal workers", True, quota=False),
    Case("equal workers, equal division", False, quota=False),
)


@dataclass(frozen=True)
class Times:
    """Seconds of a case."""

    settle: float  # not measured
    seconds: float  # measured


@dataclass(frozen=True)
class Limit:
    """What a process may use."""

    part: float  # of a core
    period: int  # microseconds in which it may use it


@contextmanager
def limit_group(limit: Limit, number: int) -> Iterator[Path]:
    """A control group of that number whose processes together are under the limit; the file that takes their ids."""
    top = Path("/sys/fs/cgroup")
    is_v2 = (top / "cgroup.controllers").exists()
    folder = (top if is_v2 else top / "cpu") / f"straggler-{os.getpid()}-{number}"
    folder.mkdir()
    try:
        if is_v2:
            (folder / "cpu.max").write_text(f"{int(limit.part * limit.period)} {limit.period}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(limit.period))
            (folder / "cpu.cfs_quota_us").write_text(str(int(limit.part * limit.period)))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def make_data(folder: str) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(numbers.ravel(), WIDTH), "y": numbers[:, 0]})
    pq.write_table(table, f"{folder}/rows.parquet", row_group_size=10_000)


def build_program(folder: str, case: Case) -> TorchTrainProgram:
    store = Store.open(folder)
    files, groups = read_footers(store, ["rows.parquet"])
    columns = (Column("x", "float32", (WIDTH,)), Column("y", "float32"))
    manifest = Manifest(columns, files, groups, "made for a benchmark", "made for a benchmark")
    step_rows = case.alone or 2 * BATCH
    plan = DataPlan.for_run(manifest.group_rows, step_rows, 1, 2, 10_000 * 4 * WIDTH, 1 << 28)
    config = FitConfig(
        feature_cols=("x",),
        label_cols=("y",),
        batch_size=case.alone or BATCH,
        epochs=1000,
        num_workers=2,
        balance_rows=case.balance_rows,
    )
    torch.manual_seed(1)
    sizes = (WIDTH, HIDDEN, HIDDEN)
    hidden = [
        layer
        for before, after in pairwise(sizes)
        for layer in (torch.nn.Linear(before, after), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(HIDDEN, 1), torch.nn.Flatten(0))
    objects = TorchUserObjects(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.01), (torch.nn.MSELoss(),)
    )
    spec = TrainSpec(
        config=config,
        rows=Rows(store, manifest, plan),
        store=store,
        result=f"final-{os.getpid()}",
        features=columns[:1],
    )
    return TorchTrainProgram(spec, objects)


def build_world(size: int) -> World:
    members = tuple(
        Member(WorkerId(f"{r}-0.1"), SlotId(f"{r}-0"), "here", r, r, size, 0, 1, START) for r in range(size)
    )
    return World(Fence(1, 1), members, 0, "a benchmark")


def train(pipe: Connection, rank: int, size: int, folder: str, case: Case, times: Times) -> None:
    """Send the seconds of a step of the world in the last `seconds`."""
    torch.set_num_threads(1)
    applied: list[float] = []

    def report(metrics: Mapping[str, Any]) -> None:
        applied.append(time.perf_counter())
        if applied[-1] - applied[0] > times.settle + times.seconds:
            raise TimeIsUp

    def exchange(own: bytes) -> list[bytes]:
        pipe.send(own)
        blobs: list[bytes] = pipe.recv()
        return blobs

    program = build_program(folder, case)
    program.prepare()
    with (
        Endpoint(KEY) as end,
        connect(end, rank, size, (1, 1), exchange, local_ranks=range(size)) as group,
    ):
        handle = WorkerHandle(lambda: INITIAL_VERSION, lambda position: None, report, lambda error: None)  # type: ignore[arg-type, return-value]
        set_context(WorkerContext(WorkerId(f"{rank}-0.1"), group=group, handle=handle, position=START))
        pipe.recv()
        try:
            program.run(build_world(size), group, handle)
        except Exception:  # the other rank's time was up a moment earlier
            if not applied or applied[-1] - applied[0] < times.settle + 0.9 * times.seconds:
                raise
        set_context(None)
    counted = [at for at in applied if at - applied[0] >= times.settle]
    pipe.send((counted[-1] - counted[0]) / (len(counted) - 1))


def measure(case: Case, folder: str, times: Times, whole: Limit) -> list[float]:
    """Seconds of a step, by process. whole: of a whole worker."""
    spawn, size = get_context("spawn"), 1 if case.alone else 2
    pipes, processes = [], []
    second = Limit((QUOTA if case.quota else 1.0) * whole.part, whole.period)
    with limit_group(whole, 0) as first_limit, limit_group(second, 1) as second_limit:
        for number in range(2):
            ours, theirs = spawn.Pipe()
            rank = 0 if case.alone else number
            arguments = (theirs, rank, size, folder, case, times)
            processes.append(spawn.Process(target=train, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        blobs = [pipe.recv() for pipe in pipes]
        for number, pipe in enumerate(pipes):
            pipe.send(blobs[number : number + 1] if case.alone else blobs)
        for process, limit in zip(processes, (first_limit, second_limit), strict=True):
            limit.write_text(str(process.pid))
        for pipe in pipes:
            pipe.send("go")
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return found


def find_best(few: list[float], many: list[float]) -> float:
    """Seconds of the quickest step of 512 rows. few, many: of steps of 256 and of 512, by process."""

    def find_longest(first: int) -> float:
        parts = (first, 2 * BATCH - first)
        return max(a + (b - a) * (part - BATCH) / BATCH for a, b, part in zip(few, many, parts, strict=True))

    return min(map(find_longest, range(1, 2 * BATCH)))


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--seconds", type=float, default=20.0)
    arguments.add_argument("--settle", type=float, default=8.0)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--core", type=float, default=1.0)
    arguments.add_argument("--period", type=int, default=100_000)
    chosen = arguments.parse_args()
    times, whole = Times(chosen.settle, chosen.seconds), Limit(chosen.core, chosen.period)
    taken: dict[Case, list[list[float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        make_data(folder)
        for _ in range(chosen.rounds):
            for case, found in taken.items():
                found.append(measure(case, folder, times, whole))
                print(f"{case.name}: {found[-1]} s a step", file=sys.stderr)
    medians = [[statistics.median(column) for column in zip(*found, strict=True)] for found in taken.values()]
    best = 2 * BATCH / find_best(*medians[:2])
    exchange = max(0.0, max(medians[5]) - medians[0][0])
    costs = (exchange, exchange / QUOTA)
    with_exchange = [[a + cost for a, cost in zip(each, costs, strict=True)] for each in medians[:2]]
    best_with_exchange = 2 * BATCH / find_best(*with_exchange)
    balanced, divided, equal, equal_divided = (2 * BATCH / max(median) for median in medians[2:])
    rows = [
        Row(f"{CASES[2].name}, beside the bound", balanced, best, "rows/s"),
        Row(f"{CASES[2].name}, beside the bound with an exchange", balanced, best_with_exchange, "rows/s"),
        Row(f"{CASES[2].name}, beside an equal division", balanced, divided, "rows/s"),
        Row(f"{CASES[4].name}, beside an equal division", equal, equal_divided, "rows/s"),
    ]
    finish("stragglers", rows, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
