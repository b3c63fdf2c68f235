"""What does a world reach in which one worker has a quarter of a core, against the most that its workers could?

Two processes of one machine, each with one thread for arithmetic, run the estimator's training loop over the same
Parquet files: an MLP of a million parameters, 256 rows a worker and step. Rank 1 is in a control group with a quota of
25 % of a core (root needed; version 1 or 2). The bound: both train alone at the same time, each for itself, once with
256 rows a step and once with 512; a line through both times says how long each needs for any number of rows, and the
best division of 512 rows among the two, without an exchange, is what nobody can be quicker than. A second bound has the
exchange: what equal workers' steps take longer than one alone, and four times that for the one with the quota. Beside
them the same world with balance_rows=False, and a world without a quota with and without balancing, whose ratio is what
balancing costs on equal workers. A case is measured for `seconds` after `settle` seconds, in which the division is
found; cases take turns, and medians of the rounds count. Half a minute a case. On a busy machine let `core` 0.4
and `period` 20000 leave so much of a core to a whole worker, and a quarter of that to the other one: what the machine
has left over then decides less.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.parts.program import build_program, write_rows
from benchmarks.parts.ranks import be_worker, compare_figures, join_group, run_ranks
from benchmarks.parts.report import Row
from spark_elastic.protocol.types import INITIAL_VERSION, START
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from spark_elastic.worker.program import WorkerHandle

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
    numbers = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
    write_rows(Path(folder, "rows.parquet"), numbers, numbers[:, 0], 10_000)


def build_case(folder: str, case: Case) -> TorchTrainProgram:
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
    config = {"batch_size": case.alone or BATCH, "epochs": 1000, "num_workers": 2}
    step_rows, balance = case.alone or 2 * BATCH, case.balance_rows
    return build_program(Path(folder), objects, step_rows, 2, balance_rows=balance, **config)


def train(
    pipe: Connection, number: int, _: int, folder: str, case: Case, times: Times, limits: list[Path]
) -> None:
    """Send the seconds of a step of the world in the last `seconds`. limits: of each process."""
    torch.set_num_threads(1)
    applied: list[float] = []

    def report(metrics: Mapping[str, Any]) -> None:
        applied.append(time.perf_counter())
        if applied[-1] - applied[0] > times.settle + times.seconds:
            raise TimeIsUp

    program = build_case(folder, case)
    program.prepare()
    rank, size = (0, 1) if case.alone else (number, 2)
    handle = WorkerHandle(lambda: INITIAL_VERSION, lambda position: None, report, lambda error: None)  # type: ignore[arg-type, return-value]
    with (
        join_group(pipe, rank, size) as group,
        be_worker(group, handle=handle, position=START) as worker,
    ):
        assert worker.world is not None
        limits[number].write_text(str(os.getpid()))
        pipe.send("ready")
        pipe.recv()
        try:
            program.run(worker.world, group, handle)
        except Exception:  # the other rank's time was up a moment earlier
            if not applied or applied[-1] - applied[0] < times.settle + 0.9 * times.seconds:
                raise
    counted = [at for at in applied if at - applied[0] >= times.settle]
    pipe.send((counted[-1] - counted[0]) / (len(counted) - 1))


def measure_case(case: Case, folder: str, times: Times, whole: Limit) -> list[float]:
    """Seconds of a step, by process. whole: of a whole worker."""
    second = Limit((QUOTA if case.quota else 1.0) * whole.part, whole.period)
    with limit_group(whole, 0) as first_limit, limit_group(second, 1) as second_limit:
        return run_ranks(2, train, folder, case, times, [first_limit, second_limit], go=True)


def find_best(few: list[float], many: list[float]) -> float:
    """Seconds of the quickest step of 512 rows. few, many: of steps of 256 and of 512, by process."""

    def find_longest(first: int) -> float:
        parts = (first, 2 * BATCH - first)
        return max(a + (b - a) * (part - BATCH) / BATCH for a, b, part in zip(few, many, parts, strict=True))

    return min(map(find_longest, range(1, 2 * BATCH)))


def measure(
    seconds: float = 20.0, settle: float = 8.0, rounds: int = 3, core: float = 1.0, period: int = 100_000
) -> list[Row]:
    times, whole = Times(settle, seconds), Limit(core, period)
    with tempfile.TemporaryDirectory() as folder:
        make_data(folder)
        cases = {case.name: partial(measure_case, case, folder, times, whole) for case in CASES}
        medians = list(compare_figures(cases, rounds).values())
    best = 2 * BATCH / find_best(*medians[:2])
    exchange = max(0.0, max(medians[5]) - medians[0][0])
    costs = (exchange, exchange / QUOTA)
    with_exchange = [[a + cost for a, cost in zip(each, costs, strict=True)] for each in medians[:2]]
    best_with_exchange = 2 * BATCH / find_best(*with_exchange)
    balanced, divided, equal, equal_divided = (2 * BATCH / max(median) for median in medians[2:])
    return [
        Row(f"{CASES[2].name}, beside the bound", balanced, best, "rows/s"),
        Row(f"{CASES[2].name}, beside the bound with an exchange", balanced, best_with_exchange, "rows/s"),
        Row(f"{CASES[2].name}, beside an equal division", balanced, divided, "rows/s"),
        Row(f"{CASES[4].name}, beside an equal division", equal, equal_divided, "rows/s"),
    ]
