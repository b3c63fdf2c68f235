"""Tasks that put rows in the order of their hash, without Spark: batches in, files of the right rows out."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data import sorted_rows
from spark_elastic.data.manifest import Column
from spark_elastic.data.reading.decoding import decode_columns
from spark_elastic.data.sorted_rows import (
    CopyTask,
    MergeTask,
    ReadTask,
    SortTask,
    hash_further,
)
from spark_elastic.data.store import Store

HASHES = ("hash", "exact")
ROWS = 5000
COLUMNS = [Column("a.b", "int64"), Column("text", "object"), *(Column(name, "int64") for name in HASHES)]
RUN_TASK = """
import pickle, sys
task, batch = pickle.load(sys.stdin.buffer)
print(len(list(task([batch]))), "pandas" in sys.modules)
"""


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
        pieces = [structs[begin : begin + 700] for begin in range(0, len(part), 700)]
        batches = [pa.RecordBatch.from_arrays([piece], ["row"]) for piece in pieces]
        for found in SortTask(store, "chunks", HASHES, split)(iter(batches)):
            for chunk in found.to_pylist():
                names[chunk["validates"]].append(chunk["name"])
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
    task = MergeTask(SortTask(store, "chunks", HASHES), "files", names, files, COLUMNS[:2], 100)
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


def test_a_schema_says_where_no_value_is_null() -> None:
    lists = pa.list_(pa.field("element", pa.float32()))
    columns = {
        "number": pa.array([1, 2, 3, 4]),
        "list": pa.array([[9.0], [1.0, 2.0], [], [3.0]], lists),
        "no number": pa.array([1, None, 3, 4]),
        "no list": pa.array([[9.0], None, [1.0], [2.0]], lists),
        "no element": pa.array([[9.0], [1.0, None], [2.0], [3.0]], lists),
    }
    rows = pa.RecordBatch.from_pydict(columns).slice(1)
    stored = sorted_rows.store_rows(rows, [Column(name, "object") for name in columns])
    stored.validate(full=True)
    assert stored.to_pydict() == rows.to_pydict()
    assert [field.name for field in stored.schema if not field.nullable] == ["number", "list", "no element"]
    elements = {field.name: field.type.value_field for field in stored.schema if pa.types.is_list(field.type)}
    assert [name for name, element in elements.items() if not element.nullable] == ["list", "no list"]
    assert {element.name for element in elements.values()} == {"element"}


ARRAYS = {
    Column("vector", "float32", (2,)): [[1.0, -0.0], [float("nan"), 2.0], [3.0, 1e-45], [4.0, 5.0]],
    Column("matrix", "int64", (2, 1)): [[[1], [2]], [[3], [-4]], [[5], [6]], [[7], [8]]],
    Column("flags", "bool", (1,)): [[True], [False], [True], [False]],
    Column("number", "float64"): [1.0, 2.0, 3.0, 4.0],
}


def test_rows_of_one_shape_are_stored_as_their_bytes(tmp_path: Path) -> None:
    arrays = [pa.array(values).slice(1) for values in ARRAYS.values()]
    arrays[0] = arrays[0].cast(pa.list_(pa.float32()))
    rows = pa.RecordBatch.from_arrays(arrays, [column.name for column in ARRAYS])
    stored = sorted_rows.store_rows(rows, [*ARRAYS])
    stored.validate(full=True)
    assert [str(field.type) for field in stored.schema][:2] == [
        "fixed_size_binary[8]",
        "fixed_size_binary[16]",
    ]
    assert not any(field.nullable for field in stored.schema)
    pq.write_table(pa.Table.from_batches([stored]), tmp_path / "rows.parquet", row_group_size=2)
    read = pq.read_table(tmp_path / "rows.parquet")
    for part in (slice(0, 3), slice(1, 3)):
        found = dict(zip(read.schema.names, read.columns, strict=True))
        found = {name: values.combine_chunks()[part] for name, values in found.items()}
        decoded = decode_columns(found, part.stop - part.start, (*ARRAYS,), {})
        for column, values in ARRAYS.items():
            wanted = np.array(values, column.dtype)[1:][part]
            assert decoded[column.name].tobytes() == wanted.tobytes()
            assert (decoded[column.name].dtype, decoded[column.name].shape) == (wanted.dtype, wanted.shape)
    with pytest.raises(ValueError, match="cannot reshape array of size 4"):
        decode_columns(found, 2, (Column("vector", "float32", (3,)),), {})


def test_arrays_of_another_length_are_not_stored() -> None:
    rows = pa.RecordBatch.from_pydict({"x": [[1.0], [2.0, 3.0], []]})
    with pytest.raises(ValueError, match="'x' has arrays of a length other than 1"):
        sorted_rows.store_rows(rows, [Column("x", "float64", (1,))])


def test_chunks_give_their_rows_though_copies_are_in_them_once(store: Store) -> None:
    rows = make_rows(copies=True)
    names = spill(store, rows, None)[False]
    numbers = pa.RecordBatch.from_pydict({"id": list(range(len(names)))})
    found = pa.Table.from_batches(
        pa.RecordBatch.from_struct_array(batch.column(0)) for batch in ReadTask(store, names)([numbers])
    )
    assert found.schema.names == rows.schema.names
    assert sorted(found["a.b"].to_pylist()) == sorted(rows["a.b"].to_pylist())
    assert sum(len(store.read_bytes(name)) for name in names) < 0.1 * rows.nbytes


def test_a_python_worker_sorts_and_merges_without_pandas_which_takes_long_to_import(tmp_path: Path) -> None:
    store, rows = Store.open(str(tmp_path)), make_rows()
    sort = SortTask(store, "chunks", HASHES, "odd")
    merge = MergeTask(sort, "files", spill(store, rows, "odd"), {False: 1, True: 1}, COLUMNS[1:2], 100)
    structs = pa.StructArray.from_arrays(rows.columns, rows.schema.names)
    batch = pa.RecordBatch.from_arrays([structs], ["row"])
    for task in ((sort, batch), (merge, pa.RecordBatch.from_pydict({"id": [0, 1]}))):
        given = pickle.dumps(task)
        done = subprocess.run([sys.executable, "-c", RUN_TASK], input=given, capture_output=True, check=True)
        assert done.stdout == b"2 False\n"


@pytest.mark.parametrize(("ranges", "shares"), [(1, 1), (3, 2), (1, 70)])
def test_each_copy_of_a_row_has_its_number_in_whatever_task_it_is_made(
    store: Store, ranges: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_rows, "CHUNK_BYTES", 9_000)
    rows = make_rows(copies=True)
    columns = ["a.b", "text"]
    sort = SortTask(store, "copies", HASHES)
    task = CopyTask(sort, spill(store, rows, "odd"), columns, ranges, shares)
    numbers = pa.RecordBatch.from_pydict({"id": list(range(2 * ranges * shares))})
    made: dict[bool, list[str]] = {False: [], True: []}
    for chunk in pa.Table.from_batches(task([numbers])).to_pylist():
        made[chunk["validates"]].append(chunk["name"])
    files = MergeTask(sort, "files", made, {False: 1, True: 1}, COLUMNS, ROWS)
    for odd in (False, True):
        keys = np.sort(rows["a.b"].to_numpy()[rows["odd"].to_numpy(zero_copy_only=False) == odd])
        copies = np.arange(len(keys)) - np.searchsorted(keys, keys)
        first = dict(zip(rows["a.b"].to_pylist(), rows["hash"].to_pylist(), strict=True))
        before = (np.array([first[key] for key in keys.tolist()]), keys // 2)
        hashes, exact = (hash_further(each.view(np.uint64), copies) for each in before)
        order = np.argsort(hashes.view(np.int64))
        found = pq.read_table(pa.BufferReader(store.read_bytes(files.write(int(odd)))))
        assert found["a.b"].to_pylist() == keys[order].tolist()
        assert found["hash"].to_pylist() == hashes[order].view(np.int64).tolist()
        assert found["exact"].to_pylist() == exact[order].view(np.int64).tolist()
