"""Tasks that put rows in the order of their hash, without Spark: batches in, files of the right rows out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes import sorted_rows
from spark_elastic.estimators.dataframes.sorted_rows import MergeTask, ReadTask, SortTask

HASHES = ("hash", "exact")
ROWS = 5000


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(str(tmp_path) if request.param == "file" else f"memory://{tmp_path.name}")


def make_rows(copies: bool = False) -> pa.RecordBatch:
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 100 if copies else ROWS, ROWS)
    hashes = rng.integers(-(2**63), 2**63, ROWS)
    return pa.RecordBatch.from_pydict(
        {
            "a.b": keys,
            "text": [f"row {key}" for key in keys],
            "hash": hashes[keys],
            "exact": keys // 2,  # some hashes are equal
            "odd": keys % 5 == 0,
        }
    )


def spill(store: Store, rows: pa.RecordBatch, split: str | None) -> dict[bool, list[str]]:
    """As two partitions of several batches."""
    names: dict[bool, list[str]] = {False: [], True: []}
    for part in (rows.slice(0, 3000), rows.slice(3000)):
        structs = pa.StructArray.from_arrays(part.columns, part.schema.names)
        batches = [
            pa.RecordBatch.from_arrays([structs[begin : begin + 700]], ["row"])
            for begin in range(0, len(part), 700)
        ]
        for found in SortTask(store, "chunks", "hash", split)(iter(batches)):
            for name, validates in zip(*(column.to_pylist() for column in found.columns), strict=True):
                names[validates].append(name)
    return names


@pytest.mark.parametrize("split", [None, "odd"])
def test_files_hold_the_rows_of_their_range_of_hashes_in_order(
    store: Store, split: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_rows, "RANGE_BYTES", 1000)
    monkeypatch.setattr(sorted_rows, "CHUNK_BYTES", 50_000)
    rows = make_rows()
    names = spill(store, rows, split)
    assert len(names[False]) > 4
    files = {False: 3} if split is None else {False: 3, True: 2}
    task = MergeTask(store, "files", names, files, HASHES, ["a.b", "text"], 100)
    written = [task.write(number) for number in range(sum(files.values()))]
    table = rows.to_pandas()
    for validates, numbers in ((False, range(3)), (True, range(3, 5)))[: len(files)]:
        mine = table if split is None else table[table.odd == validates]
        place = [(int(value) % 2**64 >> 32) * len(numbers) >> 32 for value in mine.hash]
        for number in numbers:
            wanted = mine[np.array(place) == number - numbers[0]].sort_values(list(HASHES), kind="stable")
            file = pq.ParquetFile(pa.BufferReader(store.read_bytes(written[number])))
            assert file.read().to_pydict()["text"] == wanted.text.tolist()
            assert file.schema_arrow.names == ["a.b", "text"]
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            assert counts[:-1] == [100] * (len(wanted) // 100)


def test_a_file_of_a_range_without_rows_is_not_written(store: Store) -> None:
    names = spill(store, make_rows().slice(0, 1), None)
    task = MergeTask(store, "files", names, {False: 64}, HASHES, ["a.b"], 100)
    assert sum(bool(task.write(number)) for number in range(64)) == 1


@pytest.mark.parametrize("copies", [None, "copies"])
def test_chunks_give_their_rows_or_the_number_of_copies(store: Store, copies: str | None) -> None:
    rows = make_rows(copies=True)
    names = spill(store, rows, None)[False]
    numbers = pa.RecordBatch.from_pydict({"id": list(range(len(names)))})
    found = pa.Table.from_batches(
        pa.RecordBatch.from_struct_array(batch.column(0))
        for batch in ReadTask(store, names, HASHES, copies)([numbers])
    )
    counts = [1] * len(found) if copies is None else found["copies"].to_pylist()
    assert np.array_equal(
        np.bincount(found["a.b"].to_numpy(), counts, 100), np.bincount(rows["a.b"].to_numpy(), minlength=100)
    )
    parts = [set(part.to_pylist()) for part in (rows["a.b"][:3000], rows["a.b"][3000:])]
    assert len(found) == (ROWS if copies is None else sum(map(len, parts)))
