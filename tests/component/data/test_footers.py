"""Footers of many files as arrays, and what a manifest of a million row groups takes."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.manifest import Column, FileColumns, Manifest, RowGroup, RowGroups
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.tables import footers
from spark_elastic.tables.existing_parquet import describe_files, describe_parquet
from spark_elastic.tables.footers import DataFile, FileFacts, collect_footers, collect_footers_in_threads
from spark_elastic.tables.predicate import Predicate
from tests.planned_rows import list_row_ids

MILLION = 1_000_000


def write_files(folder: Path, files: int) -> list[DataFile]:
    """In every third file the column y has another type; x has nulls."""
    for number in range(files):
        ids = np.arange(number * 10, number * 10 + 10)
        x = pa.array([[i, 1] if i % 4 else [i, None] for i in ids], pa.list_(pa.float32()))
        kind = pa.float64() if number % 3 == 0 else pa.float32()
        table = pa.table({"id": ids, "x": x, "y": pa.array(ids / 2, kind)})
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=4)
    store = Store.open(str(folder))
    return [DataFile(info) for info in store.find() if info.name.endswith(".parquet")]


def test_threads_find_in_footers_what_one_thread_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_files(tmp_path, 10)
    store, columns = Store.open(str(tmp_path)), ["id", "x", "y"]
    alone = collect_footers(store, files, columns)
    assert len({id(each.schema) for each in alone}) == 2
    assert [each.groups[1].tolist() for each in alone] == [[4, 4, 2]] * 10
    assert sum(each.nulls["x"] for each in alone) == 25
    threads: set[str] = set()

    def collect(*arguments: Any) -> list[FileFacts]:
        threads.add(threading.current_thread().name)
        return collect_footers(*arguments)

    monkeypatch.setattr(footers, "FILES_PER_THREAD", 3)
    monkeypatch.setattr(footers, "collect_footers", collect)
    assert repr(collect_footers_in_threads(store, files, columns)) == repr(alone)
    assert all(name.startswith("footers") for name in threads)


def test_an_error_of_a_thread_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_files(tmp_path, 10)
    (tmp_path / "007.parquet").write_bytes(b"no Parquet")
    monkeypatch.setattr(footers, "FILES_PER_THREAD", 3)
    with pytest.raises(StoreError, match=r"'007.parquet' .* is no Parquet file"):
        collect_footers_in_threads(Store.open(str(tmp_path)), files, ["id"])


def test_an_encrypted_footer_and_damaged_pages_are_one_sentence_with_the_file(tmp_path: Path) -> None:
    store, path = Store.open(str(tmp_path)), tmp_path / "000.parquet"
    path.write_bytes(b"x" * 100 + (50).to_bytes(4, "little") + b"PARE")
    with pytest.raises(StoreError, match=r"^'000\.parquet' in the store .* is no Parquet file: .* encrypted"):
        describe_parquet(store, ["id"])
    write_files(tmp_path, 1)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 200 + content[204:])
    where = Predicate.parse([("id", "==", 2)])
    for columns, condition in (["x"], None), (["id"], where):
        with pytest.raises(StoreError, match=r"^'000\.parquet' in the store .* cannot be read: .*$"):
            describe_files(store, [DataFile(store.describe("000.parquet"))], columns, where=condition)


def test_row_groups_are_equal_as_values_and_as_arrays() -> None:
    single = [RowGroup(0, 0, 5, 50), RowGroup(0, 1, 3, 40, 0, 6, 3), RowGroup(1, 0, 2, 9, deleted="3:x")]
    groups = RowGroups.of(single)
    assert list(groups) == single
    assert [groups[number] for number in range(3)] == single
    assert RowGroups.from_fields(groups.to_fields()) == groups
    assert RowGroups.of(single[:2]) != groups


@pytest.mark.faults  # for its duration
def test_a_million_row_groups_are_a_few_bytes_each() -> None:
    files = 100_000
    numbers = np.arange(MILLION)
    zeros = np.zeros(MILLION, np.int64)
    groups = RowGroups(numbers // 10, numbers % 10, 100 + numbers % 7, 4000 + zeros, zeros, zeros, zeros)
    kinds = [FileColumns({"year": str(year)}) for year in range(5)]
    manifest = Manifest(
        (Column("x", "float32"),), tuple(f"{n:06d}.parquet" for n in range(files)), groups, "f", "c",
        tuple(kinds[number % 5] for number in range(files)),
    )  # fmt: skip
    document = manifest.to_json()
    assert len(document) < 30 * MILLION
    gc.collect()
    tracemalloc.start()
    try:
        read = Manifest.from_json(document)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == manifest
    assert held < 150 * MILLION
    plan = DataPlan.for_run(read.group_rows, 4096, 1, 4, read.max_decoded_group_bytes(), 64 << 20)
    order = plan.permute_epoch(0)
    assert sum(len(list_row_ids(plan, order, 0, rank, 4)) for rank in range(4)) == plan.count_step_rows(0)
