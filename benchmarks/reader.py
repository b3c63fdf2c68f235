"""How fast do rows come in the plan's order, against plain pyarrow reads with a shuffle, and against petastorm?

A table of float32 arrays and a label in several files, several times as large as what a reader keeps decoded, in a warm
page cache; ours and the peers take turns, medians over the rounds. Peer: pyarrow's read_row_group on one thread in
shuffled order, each row group permuted by one take, cut into batches. Ours: the loader with its threads (one decodes,
one gathers), one rank of a world of one. rows/s: more is better; CPU: of the process, per million rows. Petastorm,
where it can be imported: two threads, rows not shuffled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.parts.ranks import compare_figures, time_rows
from benchmarks.parts.report import Row
from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.tables.existing_parquet import describe_parquet

WIDTH, FILES, BATCH = 50, 4, 1024


@dataclass(frozen=True)
class Case:
    """One table."""

    folder: Path
    store: Store
    manifest: Manifest

    @classmethod
    def write(cls, folder: Path, rows: int, group: int) -> Case:
        rng = np.random.default_rng(1)
        for number in range(FILES):
            count = rows // FILES
            flat = pa.array(rng.random(count * WIDTH, dtype=np.float32))
            offsets = pa.array(np.arange(count + 1, dtype=np.int32) * WIDTH)
            table = pa.table({"x": pa.ListArray.from_arrays(offsets, flat), "y": rng.integers(0, 10, count)})
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=group, use_dictionary=False)
        store = Store.open(str(folder))
        return cls(folder, store, describe_parquet(store, ["x", "y"]))


def read_by_loader(case: Case) -> int:
    """One epoch by the loader."""
    plan = DataPlan.for_run(
        case.manifest.group_rows, BATCH, 3, 4, case.manifest.max_decoded_group_bytes(), 256 << 20
    )
    reader = open_reader("arrow", case.store, case.manifest)
    try:
        with StepLoader(plan, reader, case.manifest.columns).steps(0, 0, 0, 1) as steps:
            return sum(len(rows) for rows in steps)
    finally:
        reader.close()


def read_by_pyarrow(case: Case) -> int:
    """One epoch by pyarrow alone."""
    rng, seen = np.random.default_rng(3), 0
    files = [pq.ParquetFile(case.folder / f"{number}.parquet") for number in range(FILES)]
    order = [(file, index) for file in files for index in range(file.num_row_groups)]
    for place in rng.permutation(len(order)):
        file, index = order[place]
        table = file.read_row_group(index, use_threads=False)
        rows = rng.permutation(table.num_rows)
        x = table["x"].combine_chunks().flatten().to_numpy().reshape(-1, WIDTH).take(rows, axis=0)
        y = table["y"].to_numpy().take(rows)
        for first in range(0, len(rows), BATCH):
            seen += len(x[first : first + BATCH]) and len(y[first : first + BATCH])
    for file in files:
        file.close()
    return seen


def read_by_petastorm(case: Case) -> int:
    """One epoch by petastorm's batch reader."""
    from petastorm import make_batch_reader

    with make_batch_reader(f"file://{case.folder}", workers_count=2, num_epochs=1) as reader:
        return sum(len(batch.y) for batch in reader)


def measure(rows: int = 4_000_000, rounds: int = 5) -> list[Row]:
    readers: dict[str, Callable[[Case], int]] = {"ours": read_by_loader, "pyarrow": read_by_pyarrow}
    if find_spec("petastorm"):
        readers["petastorm"] = read_by_petastorm
    found = []
    for group in (25_000, 10_000, 1_000):
        with tempfile.TemporaryDirectory() as folder:
            case = Case.write(Path(folder), rows, group)
            epochs = {
                name: partial(time_rows, partial(read, case), case.manifest.rows)
                for name, read in readers.items()
            }
            medians = compare_figures(epochs, rounds)
        ours = medians.pop("ours")
        for peer, figures in medians.items():
            for unit, pair in zip(("rows/s", "CPU s/M rows"), zip(ours, figures, strict=True), strict=True):
                found.append(Row(f"row groups of {group:,}, against {peer}", *pair, unit))
    return found
