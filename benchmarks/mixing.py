"""How well do rows mix that are read where they are, in a table sorted by its label, and what does more mixing cost?

A table of ten classes in the order of their labels, in Parquet files of row groups of 128 MB, as other programs write
them. For each number of lanes: the mean distance between the classes of a step (256 rows) and those of the table (total
variation: 0 is alike, 0.9 a step of one class), and the accuracy of a softmax regression after one epoch in that order;
the peer of both is the same for rows that are shuffled one by one. Then the loader's rows/s in steps of 4,096 rows over
an epoch on one thread of decoding, beside those of the default lanes: they take turns, medians over the rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.parts.ranks import compare_figures, time_rows
from benchmarks.parts.report import Row
from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.estimators.fit_rows import choose_group_bytes
from spark_elastic.estimators.run_record import plan_rows
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.tables.existing_parquet import describe_parquet
from spark_elastic.training.fit_config import FitConfig

CLASSES, WIDTH, BATCH, WIDE = 10, 50, 256, 4096
GROUP_ROWS = (128 << 20) // (4 * WIDTH)
LANES = (None, 64, 256)
RATE = 0.05

Floats = npt.NDArray[np.float64]


def make_request(batch: int, lanes: int | None) -> FitRequest[Any]:
    """A fit of one worker."""
    columns: dict[str, Any] = {"feature_cols": ("x",), "label_cols": ("y",)}
    return FitRequest(config=FitConfig(**columns, num_workers=1, batch_size=batch, lanes=lanes), objects=None)


@dataclass(frozen=True)
class Case:
    """One table in the order of its labels, each class around a point of its own."""

    store: Store
    labels: npt.NDArray[np.int64]
    x: npt.NDArray[np.float32]

    @classmethod
    def write(cls, folder: Path, rows: int) -> Case:
        draw = np.random.default_rng(1)
        labels = np.sort(draw.integers(0, CLASSES, rows))
        x = (draw.normal(size=(CLASSES, WIDTH)) * 0.3)[labels].astype(np.float32)
        x += draw.standard_normal((rows, WIDTH), np.float32)
        for number, first in enumerate(range(0, rows, GROUP_ROWS)):
            part = x[first : first + GROUP_ROWS]
            values = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), WIDTH)
            table = pa.table({"x": values, "y": labels[first : first + GROUP_ROWS]})
            pq.write_table(
                table, folder / f"{number:05}.parquet", row_group_size=GROUP_ROWS, use_dictionary=False
            )
        return cls(Store.open(str(folder)), labels, x)

    def describe(self, lanes: int | None, batch: int) -> tuple[Manifest, DataPlan]:
        """As `fit_on_parquet` does."""
        request = make_request(batch, lanes)
        manifest = describe_parquet(self.store, ["x", "y"], piece_bytes=choose_group_bytes(request))
        return manifest, plan_rows(request, manifest, batch, shuffle=True)


def iterate_plan(plan: DataPlan) -> Iterator[npt.NDArray[np.int64]]:
    """The rows of each step of an epoch, as places in the table."""
    for step in range(plan.steps):
        yield plan.compute_row_ids(plan.assign_rows(0, step, 0, 1))


def iterate_shuffled(rows: int, steps: int) -> Iterator[npt.NDArray[np.int64]]:
    """The same of rows that were shuffled one by one."""
    yield from np.array_split(np.random.default_rng(2).permutation(rows), steps)


def judge_mixing(case: Case, steps: Iterator[npt.NDArray[np.int64]]) -> tuple[float, float]:
    """(mean distance of the steps' classes from the table's, accuracy after these steps)"""
    table = np.bincount(case.labels, minlength=CLASSES) / len(case.labels)
    weights, distances = np.zeros((WIDTH + 1, CLASSES)), []
    for rows in steps:
        labels = case.labels[rows]
        distances.append(np.abs(np.bincount(labels, minlength=CLASSES) / len(rows) - table).sum() / 2)
        x = add_bias(case.x[rows])
        scores = softmax(x @ weights)
        scores[np.arange(len(rows)), labels] -= 1
        weights -= RATE * x.T @ scores / len(rows)
    found = (add_bias(case.x) @ weights).argmax(axis=1)
    return float(np.mean(distances)), float(np.mean(found == case.labels))


def add_bias(x: npt.NDArray[np.float32]) -> Floats:
    return np.hstack([x, np.ones((len(x), 1))])


def softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def read_epoch(case: Case, manifest: Manifest, plan: DataPlan) -> int:
    """Rows of an epoch."""
    with closing(open_reader("arrow", case.store, manifest)) as reader:
        with StepLoader(plan, reader, manifest.columns).steps(0, 0, 0, 1) as steps:
            return sum(len(step) for step in steps)


def measure(rows: int = 5_000_000, mixed: int = 1_500_000, rounds: int = 3) -> list[Row]:
    """mixed: rows of the table whose mixing is judged."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        case = Case.write(Path(folder), mixed)
        ideal = judge_mixing(case, iterate_shuffled(mixed, -(-mixed // BATCH)))
        for lanes in LANES:
            _, plan = case.describe(lanes, BATCH)
            distance, accuracy = judge_mixing(case, iterate_plan(plan))
            name = f"sorted by label, {plan.lanes} lanes{'' if lanes else ' (default)'}"
            found.append(Row(f"{name}: distance of a step's classes", distance, ideal[0], "TV"))
            found.append(Row(f"{name}: accuracy after an epoch", accuracy, ideal[1], "share"))
    with tempfile.TemporaryDirectory() as folder:
        case = Case.write(Path(folder), rows)
        plans = [case.describe(lanes, WIDE) for lanes in LANES]
        epochs = {
            str(plan.lanes): partial(time_rows, partial(read_epoch, case, manifest, plan), rows)
            for manifest, plan in plans
        }
        (default, (base, _)), *others = compare_figures(epochs, rounds).items()
    for lanes, (speed, _) in others:
        name = f"row groups of 128 MB, {lanes} lanes: loader, beside {default}"
        found.append(Row(name, speed, base, "rows/s"))
    return found
