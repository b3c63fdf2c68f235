"""Parquet that somebody else wrote: what is read of it, what is refused, and row groups larger than memory."""

from __future__ import annotations

import decimal
import os
import sys
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Column, Manifest, RowGroups
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.tables.existing_parquet import (
    describe_files,
    describe_parquet,
    find_data_files,
    locate_files,
)
from spark_elastic.tables.predicate import Predicate
from tests.component.column_kinds import READERS, VECTOR
from tests.planned_rows import read_columns


def write(folder: Path, name: str, columns: dict[str, Any], **options: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)


def columns_of(first: int, rows: int) -> dict[str, Any]:
    ids = np.arange(first, first + rows)
    return {
        "id": ids,
        "x": pa.array([[i, -i, 1] for i in ids], pa.list_(pa.float32())),
        "price": pa.array([decimal.Decimal(int(i)) / 4 for i in ids], pa.decimal128(10, 2)),
        "odd": ids % 2 == 1,
        "image": pa.array([bytes([i % 256]) * int(i) for i in ids], pa.binary()),
        "day": pa.array(ids, pa.int32()).cast(pa.date32()),
        "unused": pa.array([None] * rows, pa.string()),
    }


@pytest.mark.parametrize("piece_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("reader", READERS)
def test_every_kind_of_column_of_partitions(tmp_path: Path, reader: str, piece_bytes: int) -> None:
    write(tmp_path, "year=2023/part-0.parquet", columns_of(0, 25), row_group_size=11)
    write(tmp_path, "year=2024/part-0.parquet", columns_of(25, 12))
    write(tmp_path, "year=2024/part-1.parquet", columns_of(37, 0))
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "_delta" / "x.parquet").mkdir(parents=True)
    store, names = Store.open(str(tmp_path)), ["id", "x", "price", "odd", "image", "day", "year"]
    manifest = describe_parquet(store, names, transformed=True, piece_bytes=piece_bytes)
    assert manifest.columns == (
        Column("id", "int64"),
        Column("x", "float32", (3,)),
        Column("price", "float64"),
        Column("odd", "bool"),
        Column("image", "object"),
        Column("day", "datetime64[D]"),
        Column("year", "int64"),
    )
    found, ids = read_columns(store, manifest, reader=reader), np.arange(37)
    assert np.array_equal(found["id"], ids)
    assert np.array_equal(found["x"], np.stack([ids, -ids, np.ones(37)], axis=1))
    assert np.array_equal(found["price"], ids / 4)
    assert np.array_equal(found["odd"], ids % 2 == 1)
    assert [len(each) for each in found["image"]] == list(range(37))
    assert np.array_equal(found["day"].astype("int64"), ids)
    assert np.array_equal(found["year"], np.where(ids < 25, 2023, 2024))


def test_columns_of_folders_alone_are_read_in_pieces_though_files_have_none_of_them(tmp_path: Path) -> None:
    write(tmp_path, "year=2024/a.parquet", {"x": np.arange(100)})
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["year"], piece_bytes=80)
    assert len(manifest.row_groups) > 3
    assert read_columns(store, manifest)["year"].tolist() == [2024] * 100


@pytest.mark.parametrize(("number", "dtype"), [(2**63 - 1, "int64"), (-(2**63), "int64"), (2**63, "float64")])
def test_whole_numbers_of_folders_are_int64_if_all_fit(tmp_path: Path, number: int, dtype: str) -> None:
    for each in (1, number):
        write(tmp_path, f"k={each}/a.parquet", {"x": np.arange(2)})
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["k"])
    assert manifest.columns == (Column("k", dtype),)
    assert sorted(set(read_columns(store, manifest)["k"].tolist())) == sorted([1, number])


@pytest.mark.parametrize("reader", READERS)
def test_p1_a_step_takes_the_same_rows_by_any_reader(tmp_path: Path, reader: str) -> None:
    columns = {name: columns_of(0, 90)[name] for name in ("id", "image")}
    write(tmp_path, "a.parquet", columns, row_group_size=40)
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["id", "image"], transformed=True, piece_bytes=400)
    assert len(manifest.row_groups) > 3
    plan = DataPlan(manifest.group_rows, 16, seed=2, lanes=3)
    seen: list[int] = []
    with closing(open_reader(reader, store, manifest)) as opened:
        for rank in range(3):
            with StepLoader(plan, opened, manifest.columns).steps(1, 0, rank, 3) as steps:
                for rows in steps:
                    assert np.array_equal(rows.columns["id"], rows.row_ids)
                    assert [len(each) for each in rows.columns["image"]] == rows.row_ids.tolist()
                    seen += rows.row_ids.tolist()
    assert sorted(seen) == list(range(90))


@pytest.mark.parametrize("beside", [[], ["id"]])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
@pytest.mark.parametrize("reader", READERS)
def test_timestamps_of_all_years_as_spark_writes_them(
    tmp_path: Path, reader: str, piece_bytes: int, beside: list[str]
) -> None:
    when = [datetime(1, 1, 1), datetime(1677, 1, 1), datetime(2024, 1, 1), datetime(9999, 12, 31)] * 10
    columns = {"t": pa.array(when, pa.timestamp("us")), "id": np.arange(40)}
    write(tmp_path, "a.parquet", columns, use_deprecated_int96_timestamps=True)
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["t", *beside], transformed=True, piece_bytes=piece_bytes)
    found = read_columns(store, manifest, reader=reader)
    np.testing.assert_array_equal(found["t"], np.array(when, "datetime64[us]"))
    assert [found[name].tolist() for name in beside] == [list(range(40)) for _ in beside]


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_a_column_with_a_dot_beside_a_struct_with_that_field(tmp_path: Path, piece_bytes: int) -> None:
    """Parquet has one path for both. The struct has no part in what is read of the column."""
    values = np.arange(9.0)
    struct = [{"b": None if i % 2 else i} for i in range(9)]
    write(tmp_path, "a.parquet", {"a": struct, "a.b": values, "z": values}, write_statistics=False)
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["a.b", "z"], piece_bytes=piece_bytes)
    assert manifest.columns == (Column("a.b", "float64"), Column("z", "float64"))
    for found in read_columns(store, manifest).values():
        assert np.array_equal(found, values)
    where = Predicate.parse([("a.b", ">", 3.5)])
    files = find_data_files([f"file://{tmp_path}/a.parquet"], ["a.b"], {})
    assert describe_files(*files, ["a.b"], where=where).rows == 5


def test_vectors_as_spark_writes_them(tmp_path: Path) -> None:
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0, 4.0]}
    sparse = {"type": 0, "size": 4, "indices": [1, 3], "values": [5.0, 6.0]}
    empty = {"type": 0, "size": 4, "indices": [], "values": []}
    write(tmp_path, "a.parquet", {"v": pa.array([sparse, dense, empty, sparse], VECTOR)})
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["v"])
    assert manifest.columns == (Column("v", "float32", (4,)),)
    first, second, third = [0, 5, 0, 6], [1, 2, 3, 4], [0] * 4
    assert read_columns(store, manifest)["v"].tolist() == [first, second, third, first]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"x": pa.array([1.0, None, None])}, "column 'x' has 2 nulls in 3 rows"),
        ({"x": pa.array([[1.0], [None]])}, "column 'x' has 1 nulls in 2 rows"),
        ({"x": pa.array([[1.0], [2.0, 3.0]])}, "lengths: row group 0 of 'a.parquet' has 3 values in 2"),
        ({"x": pa.array(["a"])}, "'x' is string, which cannot be trained on"),
        ({"x": pa.array([], pa.float32())}, "have no rows"),
        ({"y": pa.array([1])}, r"no column 'x' in .*: it has the columns \['y'\]"),
    ],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_unsupported_files_and_columns_are_refused(
    tmp_path: Path, columns: dict[str, Any], says: str, statistics: bool
) -> None:
    write(tmp_path, "a.parquet", columns, write_statistics=statistics)
    with pytest.raises(InvalidInput, match=says):
        describe_parquet(Store.open(str(tmp_path)), ["x"])


def test_the_reader_finds_array_lengths_that_add_up_by_chance(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"x": pa.array([[1.0, 1.0], [2.0], [3.0, 3.0, 3.0]])})
    store = Store.open(str(tmp_path))
    with pytest.raises(StoreError, match="arrays of a length other than 2"):
        read_columns(store, describe_parquet(store, ["x"]))


def test_differing_schemas_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no Parquet file under"):
        describe_parquet(Store.open(str(tmp_path)), ["x"])
    write(tmp_path, "a.parquet", {"x": [1]})
    write(tmp_path, "b.parquet", {"x": [1.0]})
    with pytest.raises(InvalidInput, match=r"'x' is int64 in 'a\.parquet' and double in 'b\.parquet'"):
        describe_parquet(Store.open(str(tmp_path)), ["x"])


NOON = datetime(2024, 5, 6, 12)
# As Spark writes arrays of rows; those of a query may be null.
OF_ROWS = pa.list_(pa.field("element", pa.int64(), nullable=False))


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array(["a", "b"]), pa.array(["c", "d"], pa.large_string())),
        (pa.array(["a", "b"]), pa.array(["c", "d"]).dictionary_encode()),
        (pa.array([b"a", b"b"]), pa.array([b"c", b"d"], pa.large_binary())),
        (pa.array([[1.0], [2.0]]), pa.array([[3.0], [4.0]], pa.large_list(pa.float64()))),
        (pa.array([[1.0], [2.0]]), pa.array([[3.0], [4.0]], pa.list_(pa.float64(), 1))),
        (pa.array([[1], [2]]), pa.array([[3], [4]], OF_ROWS)),
        # As pandas 2 and pandas 3 write times.
        (pa.array([NOON, NOON], pa.timestamp("ns")), pa.array([NOON, NOON], pa.timestamp("us"))),
    ],
)
def test_files_that_keep_the_same_values_in_other_ways_are_read_together(
    first: pa.Array, second: pa.Array, piece_bytes: int, tmp_path: Path
) -> None:
    write(tmp_path, "a.parquet", {"x": first})
    write(tmp_path, "b.parquet", {"x": second})
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["x"], transformed=True, piece_bytes=piece_bytes)
    assert read_columns(store, manifest)["x"].tolist() == [*first.to_pylist(), *second.to_pylist()]


@pytest.mark.parametrize(
    ("name", "says"), [("avro", "choose one of arrow, petastorm"), ("petastorm", "needs pyarrow 14")]
)
def test_an_unknown_reader_is_refused(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "petastorm", None)
    manifest = Manifest((), (), RowGroups.of([]), "", "")
    with pytest.raises(InvalidInput, match=says):
        open_reader(name, Store.open("memory://x"), manifest)


def test_files_and_folders_are_found_in_one_store(tmp_path: Path) -> None:
    for name in ("a/1.parquet", "a/_hidden/2.parquet", "b/3.parquet", "_c/4.parquet"):
        write(tmp_path, name, columns_of(0, 5))
    store, names = locate_files([f"{tmp_path}/a", f"{tmp_path}/b/3.parquet", f"{tmp_path}/_c"], {})
    assert (store.root, names) == (str(tmp_path), ("a", "b/3.parquet", "_c"))
    assert describe_parquet(store, ["x"], names=names).files == ("a/1.parquet", "b/3.parquet", "_c/4.parquet")
    overlapping = describe_parquet(store, ["x"], names=["a", "a/1.parquet", "", "b"])
    assert overlapping.files == ("a/1.parquet", "b/3.parquet")
    alone, names = locate_files([f"{tmp_path}/a/1.parquet"], {})
    assert (alone.url, names) == (f"file://{tmp_path}/a", ("1.parquet",))
    assert describe_parquet(alone, ["x"], names=names).rows == 5
    with pytest.raises(StoreError, match=r"There is no Parquet file under file://.*/d"):
        describe_parquet(store, ["x"], names=["d"])
    with pytest.raises(InvalidInput, match="lie in different file systems"):
        locate_files([str(tmp_path), "memory://rows"], {})


def test_months_that_are_written_with_an_underscore_are_texts(tmp_path: Path) -> None:
    for month in ("2024_01", "2024_02"):
        write(tmp_path, f"month={month}/0.parquet", {"x": [1]})
    store = Store.open(str(tmp_path))
    with pytest.raises(InvalidInput, match="'month' is string, which cannot be trained on"):
        describe_parquet(store, ["x", "month"])
    found = read_columns(store, describe_parquet(store, ["x", "month"], transformed=True))
    assert found["month"].tolist() == ["2024_01", "2024_02"]


def test_columns_that_lie_in_paths_are_read_without_those_of_the_files(tmp_path: Path) -> None:
    for day in (1, 2):
        write(tmp_path, f"_day={day}/_temporary/0.parquet", {"x": [0]})
        write(tmp_path, f"_day={day}/0.parquet", {"x": [day] * day})
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["x", "_day"])
    assert read_columns(store, manifest)["_day"].tolist() == [1, 2, 2]
    reader = open_reader("arrow", store, manifest, ["_day"])
    assert [reader.fetch(group)["_day"].tolist() for group in range(2)] == [[1], [2, 2]]
    reader.close()


def test_files_without_a_suffix_are_read_as_hive_and_flink_write_them(tmp_path: Path) -> None:
    """Beside files that Spark wrote into the same table, and a text."""
    files = "year=2024/000000_0", "year=2024/part-0.snappy.parquet", "year=2025/part-0-1"
    for number, name in enumerate(files):
        write(tmp_path, name, {"x": [number]})
    (tmp_path / "README.md").write_text("of these files")
    for name in ("_SUCCESS", "month=1_$folder$"):
        (tmp_path / "year=2024" / name).write_text("")
    store, names = locate_files([str(tmp_path)], {})
    assert read_columns(store, describe_parquet(store, ["x"], names=names))["x"].tolist() == [0, 1, 2]
    store, names = locate_files([str(tmp_path / "year=2024" / "000000_0")], {})
    assert read_columns(store, describe_parquet(store, ["x"], names=names))["x"].tolist() == [0]
    (tmp_path / "LICENSE").write_text("to use these files")
    with pytest.raises(StoreError, match=r"'LICENSE' in the store .* is no Parquet file"):
        describe_parquet(Store.open(str(tmp_path)), ["x"])


def test_a_folder_that_paths_spell_differently_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, "a/1.parquet", columns_of(0, 3))
    write(tmp_path, "a/b/2.parquet", columns_of(3, 2))
    paths = [f"{tmp_path}/a", f"{tmp_path}/a/.", f"{tmp_path}/./a/./b", f"{tmp_path}/a//b/2.parquet"]
    store, names = locate_files(paths, {})
    assert (store.url, names) == (f"file://{tmp_path}/a", ("", "", "b", "b/2.parquet"))
    assert describe_parquet(store, ["id"], names=names).files == ("1.parquet", "b/2.parquet")


@pytest.mark.parametrize("piece_bytes", [100, 1 << 20])
@pytest.mark.parametrize("keeps_time", [True, False])
def test_a_file_that_is_written_again_in_mid_run_is_never_read_unnoticed(
    tmp_path: Path, piece_bytes: int, keeps_time: bool
) -> None:
    """Other values in the same place; a writer that keeps the old time has other bytes."""
    for name in ("a", "b"):
        write(tmp_path, f"{name}.parquet", columns_of(0, 40))
    store = Store.open(str(tmp_path))
    found = describe_parquet(store, ["id", "x"], piece_bytes=piece_bytes)
    manifest = Manifest.from_json(found.to_json())
    assert manifest == found
    with closing(open_reader("arrow", store, manifest)) as reader:
        first = reader.fetch(0)["id"]
        before = (tmp_path / "a.parquet").stat()
        write(tmp_path, "a.parquet", columns_of(100, 40), compression="none" if keeps_time else "snappy")
        if keeps_time:
            os.utime(tmp_path / "a.parquet", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert np.array_equal(reader.fetch(0)["id"], first), "what was read before is kept"
        reader.fetch(len(manifest.row_groups) - 1)
        with closing(open_reader("arrow", store, manifest)) as later:
            with pytest.raises(StoreError, match=r"'a\.parquet' in the store .* was written again after"):
                later.fetch(0)
    (tmp_path / "b.parquet").unlink()
    with closing(open_reader("arrow", store, manifest)) as later:
        with pytest.raises(StoreError, match=r"(?s)'b\.parquet'.*No such file"):
            later.fetch(len(manifest.row_groups) - 1)


def test_files_are_found_by_spark_s_urls_with_the_values_in_their_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    for name in ("2023/kind=x%2Fy/1.parquet", "2024/kind=z/2.parquet", "2024/kind=z/unused.parquet"):
        write(folder, f"year={name}", {"id": [1, 2]})
    base = f"{tmp_path}/a%20b"
    urls = [f"file://{base}/year=2023/kind=x%252Fy/1.parquet", f"file:{base}/year=2024/kind=z/2.parquet"]
    store, files = find_data_files(urls, ["id", "year", "kind"], {})
    assert store.root == str(folder)
    assert [(file.info.name, file.constants) for file in files] == [
        ("year=2023/kind=x%2Fy/1.parquet", {"year": "2023", "kind": "x/y"}),
        ("year=2024/kind=z/2.parquet", {"year": "2024", "kind": "z"}),
    ]
    (one,) = find_data_files(urls[1:], ["year"], {})[1]
    renamed, part = one.rename_columns({"label": "id", "when": "year"}), folder / "year=2024/kind=z"
    manifest = describe_files(Store.open(str(part)), [renamed], ["label", "when"])
    assert read_columns(Store.open(str(part)), manifest)["label"].tolist() == [1, 2]
    assert manifest.columns == (Column("label", "int64"), Column("when", "int64"))
    with pytest.raises(StoreError, match=r"has no 'year=2024/kind=z/3\.parquet'"):
        find_data_files([*urls, f"{urls[1][:-9]}3.parquet"], [], {})
    with pytest.raises(InvalidInput, match="The files lie in several file systems"):
        find_data_files([*urls, "s3a://bucket/x.parquet"], [], {})
