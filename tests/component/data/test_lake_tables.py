"""Tables of Delta and Iceberg, made by the formats' own packages: what is read is what these packages read."""

from __future__ import annotations

import json
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, convert_to_deltalake, write_deltalake
from deltalake.schema import Field, PrimitiveType, Schema
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
from pyiceberg.typedef import Record
from pyiceberg.types import DecimalType, DoubleType, LongType
from pyiceberg.utils.concurrent import ExecutorFactory
from pyroaring import BitMap

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.fit_rows import FileRows, Selection, open_table_rows
from spark_elastic.tables.existing_parquet import describe_files
from spark_elastic.tables.lake_tables import join_stores, read_snapshot
from spark_elastic.tables.predicate import Predicate
from tests.delta_files import delete_by_vector
from tests.leaks import SessionOwned
from tests.planned_rows import read_columns

ROWS = 5000


@pytest.fixture(scope="module", autouse=True)
def runtime(session_owned: SessionOwned, tmp_path_factory: pytest.TempPathFactory) -> None:
    """deltalake's own event loop, which it keeps for the life of the process."""
    with session_owned.adopt():
        write_deltalake(str(tmp_path_factory.mktemp("first")), make_rows(0, 1))


def make_rows(start: int, rows: int = ROWS, **more: Any) -> pa.Table:
    x = np.arange(start, start + rows)
    return pa.table({"x": x, "y": x * 0.5, **more})


def read_rows(table: Any, columns: list[str], version: Any = None, **options: Any) -> list[tuple[Any, ...]]:
    """All rows, by our own reader, through the manifest's document."""
    snapshot = read_snapshot(table, version, {})
    manifest = describe_files(snapshot.store, snapshot.files, columns, **options)
    found = read_columns(snapshot.store, Manifest.from_json(manifest.to_json()), columns)
    return sorted(zip(*(found[name].tolist() for name in columns), strict=True))


def expect(table: pa.Table, columns: list[str]) -> list[tuple[Any, ...]]:
    return sorted(zip(*(table[name].to_pylist() for name in columns), strict=True))


# ---- Delta


def test_a_delta_version_is_read_whatever_is_written_to_the_table_later(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for start in (0, ROWS):
        write_deltalake(folder, make_rows(start), mode="append")
    before = expect(DeltaTable(folder).to_pyarrow_table(), ["x", "y"])
    moment = datetime.now(timezone.utc)
    time.sleep(0.01)
    table = DeltaTable(folder)
    table.delete("x % 3 = 0")
    table.optimize.compact()
    write_deltalake(folder, make_rows(9 * ROWS, 7), mode="append")
    for version in (1, moment, moment.isoformat()):
        assert read_rows(folder, ["x", "y"], version) == before
    newest = expect(DeltaTable(folder).to_pyarrow_table(), ["x", "y"])
    assert read_rows(folder, ["x", "y"]) == read_rows(DeltaTable(folder), ["x", "y"]) == newest != before
    with pytest.raises(InvalidInput, match=r"The Delta table .* cannot be read of version 99: "):
        read_snapshot(folder, 99, {})
    with pytest.raises(InvalidInput, match="had no version at 1999-01-01 00:00:00: its oldest, 0, is of 20"):
        read_snapshot(folder, "1999-01-01", {})
    DeltaTable(folder).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(StoreError, match=r"has no 'part-.*\.parquet'"):
        read_rows(folder, ["x", "y"], 1)


def test_partition_columns_of_delta_are_read_with_their_values(tmp_path: Path) -> None:
    year, name = pa.array([2023, 2023, 2024, 2024, 2025, 2025], pa.int32()), ["a b", "ä/%", "c=d"] * 2
    rows = make_rows(0, 6, year=year, big=[True, False] * 3, name=name)
    write_deltalake(str(tmp_path), rows, partition_by=["year", "big", "name"])
    columns = ["x", "year", "big", "name"]
    assert read_rows(tmp_path, columns, transformed=True) == expect(rows, columns)
    nulls = make_rows(6, 1, year=pa.array([None], pa.int32()), big=[True], name=["z"])
    write_deltalake(str(tmp_path), nulls, partition_by=["year", "big", "name"], mode="append")
    with pytest.raises(InvalidInput, match="The column 'year' has 1 nulls in 7 rows"):
        read_rows(tmp_path, ["x", "year"])
    assert len(read_rows(tmp_path, ["x", "big"])) == 7


def test_the_table_s_schema_decides_what_a_partition_column_of_delta_is(tmp_path: Path) -> None:
    """Not the look of its values: texts of digits stay texts."""
    midnight = datetime(2024, 2, 3, tzinfo=timezone.utc)
    columns = {
        "month": pa.array(["01", "02"]),
        "answer": pa.array(["True", "false"]),
        "small": pa.array([1, 2], pa.int8()),
        "ratio": pa.array([0.1, 0.25], pa.float32()),
        "day": pa.array([date(2024, 2, 3), date(1600, 1, 1)]),
        "time": pa.array([midnight, midnight + timedelta(microseconds=5)], pa.timestamp("us", "UTC")),
        "price": pa.array([Decimal("1.50"), Decimal("2.25")]),
    }
    kinds = ["object", "object", "int8", "float32", "datetime64[D]", "datetime64[us]", "float64"]
    for (name, values), kind in zip(columns.items(), kinds, strict=True):
        folder = tmp_path / name
        write_deltalake(str(folder), make_rows(0, 2, **{name: values}), partition_by=[name])
        snapshot = read_snapshot(folder, None, {})
        renamed = [file.rename_columns({"k": name}) for file in snapshot.files]
        for files, own in (snapshot.files, name), (renamed, "k"):
            manifest = describe_files(snapshot.store, files, [own], transformed=True)
            assert manifest.columns == (Column(own, kind),)
        stored = [each.replace(tzinfo=None) if name == "time" else each for each in values.to_pylist()]
        assert read_rows(folder, ["x", name], transformed=True) == list(enumerate(stored))
    with pytest.raises(InvalidInput, match="'month' is string, which cannot be trained on"):
        read_rows(tmp_path / "month", ["x", "month"])


def test_bytes_that_a_table_is_partitioned_by_are_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), make_rows(0, 2, key=[b"ab", b"\xff"]), partition_by=["key"])
    with pytest.raises(InvalidInput, match="The column 'key' is binary, and the table is partitioned by it"):
        read_rows(tmp_path, ["x", "key"], transformed=True)
    assert len(read_rows(tmp_path, ["x"])) == 2


@pytest.mark.parametrize("piece_bytes", [1 << 30, 1000])
def test_rows_that_a_deletion_vector_names_are_left_out(tmp_path: Path, piece_bytes: int) -> None:
    """Also where a row group is cut into pieces, of which some lose all their rows."""
    write_deltalake(str(tmp_path), make_rows(0))
    write_deltalake(str(tmp_path), make_rows(ROWS), mode="append")
    table = DeltaTable(tmp_path)
    added = pa.table(table.get_add_actions()).to_pylist()
    path = next(each["path"] for each in added if each["min"]["x"] == 0)
    deleted = [*range(7), *range(300, 1200), ROWS - 1]
    delete_by_vector(tmp_path, path, deleted)
    kept = [x for x in range(2 * ROWS) if x not in set(deleted)]
    assert read_rows(tmp_path, ["x", "y"], piece_bytes=piece_bytes) == [(x, x * 0.5) for x in kept]
    assert len(read_rows(tmp_path, ["x"], 1, piece_bytes=piece_bytes)) == 2 * ROWS


def test_a_deletion_vector_counts_for_one_of_several_files_of_a_name(tmp_path: Path) -> None:
    """Partitions that pyarrow wrote, and that became a table of Delta: the files of all have one name."""
    folder = tmp_path / "a table"
    pq.write_to_dataset(make_rows(0, 8, odd=["b", "c"] * 4), folder, partition_cols=["odd"])
    fields = [Field("odd", PrimitiveType("string"))]
    convert_to_deltalake(str(folder), partition_by=Schema(fields), partition_strategy="hive")
    paths = pa.table(DeltaTable(folder).get_add_actions())["path"].to_pylist()
    assert len(paths) == 2
    assert len({path.rpartition("/")[2] for path in paths}) == 1
    delete_by_vector(folder, min(paths), [0, 3], odd="b")
    assert read_rows(folder, ["x"]) == [(x,) for x in (1, 2, 3, 4, 5, 7)]


@pytest.mark.parametrize("piece_bytes", [1 << 30, 10])
def test_texts_of_delta_are_read_after_an_update_leaves_views(tmp_path: Path, piece_bytes: int) -> None:
    values = {"s": ["a", "b", "c", "d"], "b": [b"1", b"2", b"3", b"4"], "l": [["x"], ["y"], ["z"], ["w"]]}
    write_deltalake(str(tmp_path), make_rows(0, 4, **values))
    DeltaTable(tmp_path).update(predicate="x < 2", updates={"s": "'new'"})
    write_deltalake(str(tmp_path), make_rows(4, 4, **values), mode="append")
    kinds = {str(pq.read_schema(path).field("s").type) for path in tmp_path.glob("*.parquet")}
    assert kinds == {"string", "string_view"}
    columns = ["x", "s", "b", "l"]
    expected = expect(DeltaTable(tmp_path).to_pyarrow_table(), columns)
    options: dict[str, Any] = {"transformed": True, "piece_bytes": piece_bytes}
    assert read_rows(tmp_path, columns, **options) == expected
    where = Predicate.parse([("s", "in", ["new", "d"]), ("b", "!=", b"2")])
    found = read_rows(tmp_path, columns, where=where, **options)
    assert found == [expected[x] for x in (0, 3, 7)]


def test_columns_of_delta_are_found_by_their_physical_names(tmp_path: Path) -> None:
    """A table as Databricks writes it after a column was renamed."""
    write_deltalake(str(tmp_path), make_rows(0).rename_columns(["col-1", "y"]))
    (log,) = (tmp_path / "_delta_log").glob("*.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "metaData" in line:
            schema = json.loads(line["metaData"]["schemaString"])
            for number, field in enumerate(schema["fields"]):
                mapping = {"id": number + 1, "physicalName": field["name"]}
                physical = {f"delta.columnMapping.{name}": value for name, value in mapping.items()}
                field.update(metadata=physical, name={"col-1": "x"}.get(field["name"], field["name"]))
            mode = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"}
            line["metaData"].update(schemaString=json.dumps(schema), configuration=mode)
        if "protocol" in line:
            line["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
    log.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_rows(tmp_path, ["x", "y"]) == [(x, x * 0.5) for x in range(ROWS)]
    with pytest.raises(InvalidInput, match=r"There is no column 'col-1' in .*: it has .*x"):
        read_rows(tmp_path, ["col-1"])


def test_rows_from_before_a_column_match_no_comparison_with_it(catalog: Any, tmp_path: Path) -> None:
    """As nulls: a file that lacks the column has none of its values."""
    later = make_rows(3, 3, z=[0.5, 1.5, 2.5])
    write_deltalake(str(tmp_path / "delta"), make_rows(0, 3))
    write_deltalake(str(tmp_path / "delta"), later, mode="append", schema_mode="merge")
    table = make_table(catalog, make_rows(0, 3))
    with table.update_schema() as change:
        change.add_column("z", DoubleType())
    table.append(later)
    for source in (tmp_path / "delta", table):
        for comparison, expected in ((">", 1.0), [4, 5]), (("!=", 1.5), [3, 5]), (("not in", []), [3, 4, 5]):
            where = Predicate.parse([("z", *comparison)])
            assert read_rows(source, ["x", "z"], where=where) == [(x, x - 2.5) for x in expected]
        either = Predicate.parse([[("z", ">", 1.0)], [("x", "<", 2)]])
        assert read_rows(source, ["x"], where=either) == [(0,), (1,), (4,), (5,)]
        with pytest.raises(InvalidInput, match="where compares column 'w', which is missing in"):
            read_rows(source, ["x"], where=Predicate.parse([("w", ">", 1.0)]))


def test_a_table_of_delta_that_is_open_may_lie_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my tables, 100% ünï a#b?c"
    write_deltalake(str(folder), make_rows(0, 2))
    assert read_rows(DeltaTable(folder), ["x"]) == [(0,), (1,)]


def test_two_tables_are_read_from_the_folder_that_holds_both(tmp_path: Path) -> None:
    for name in ("train", "seen"):
        write_deltalake(str(tmp_path / name), make_rows(0, 3))
    store, parts = join_stores([read_snapshot(tmp_path / name, None, {}) for name in ("train", "seen")])
    assert store.url == f"file://{tmp_path}"
    names = [describe_files(store, files, ["x"]).files[0] for files in parts]
    assert [name.partition("/")[0] for name in names] == ["train", "seen"]


# ---- Iceberg


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Any]:
    catalog = SqlCatalog("own", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("n")
    yield catalog
    catalog.close()
    ExecutorFactory.get_or_create().shutdown()  # pyiceberg keeps its threads otherwise
    ExecutorFactory._instance = None


def make_table(catalog: Any, rows: pa.Table, *partitions: str) -> Any:
    """A table of these rows, partitioned by the values of those columns."""
    table = catalog.create_table("n.t", rows.schema)
    with table.update_spec() as change:
        for name in partitions:
            change.add_identity(name)
    table.append(rows)
    return table


def test_an_iceberg_snapshot_is_read_whatever_is_written_later(catalog: Any, tmp_path: Path) -> None:
    table = catalog.create_table("n.t", make_rows(0).schema)
    with pytest.raises(InvalidInput, match="has no snapshot: it has none"):
        read_snapshot(table, None, {})
    table.append(make_rows(0))
    first = table.current_snapshot().snapshot_id
    moment = datetime.now(timezone.utc)
    time.sleep(0.01)
    with table.update_schema() as change:
        change.rename_column("y", "label")
    table.append(make_rows(ROWS).rename_columns(["x", "label"]))
    table.delete("x < 100")
    before = [(x, x * 0.5) for x in range(ROWS)]
    after = [(x, x * 0.5) for x in range(100, 2 * ROWS)]
    assert read_rows(table, ["x", "label"]) == after
    for place in (tmp_path / "n" / "t", table.metadata_location):
        assert read_rows(place, ["x", "label"]) == after
    for version in (first, moment, moment.isoformat(), moment.isoformat().replace("+00:00", "Z")):
        assert read_rows(table, ["x", "y"], version) == before
    with pytest.raises(InvalidInput, match=r"has no snapshot 5: it has \d+, "):
        read_snapshot(table, 5, {})


def test_files_without_ids_are_read_by_the_mapping_of_names(catalog: Any, tmp_path: Path) -> None:
    rows = pa.table({"x": [1.0, 2.0], "y": [10.0, 20.0], "z": [5.0, 6.0]})
    pq.write_table(rows, tmp_path / "given.parquet")
    table = catalog.create_table("n.t", rows.schema)
    table.add_files([str(tmp_path / "given.parquet")])
    for old, new in (("x", "former"), ("y", "x"), ("z", "last")):
        with table.update_schema() as change:
            change.rename_column(old, new)
    found = read_rows(catalog.load_table("n.t"), ["x", "last"])
    assert found == expect(table.scan().to_arrow(), ["x", "last"]) == [(10.0, 5.0), (20.0, 6.0)]
    ids, path = {"x": 2, "last": 3}, tmp_path / "deletes.parquet"
    values, table = with_ids(pa.table({"x": [20.0], "last": [6.0]}), **ids), catalog.load_table("n.t")
    commit_deletes(table, DataFileContent.EQUALITY_DELETES, path, values, equality_ids=[*ids.values()])
    assert read_rows(catalog.load_table("n.t"), ["x", "last"]) == [(10.0, 5.0)]


def commit_deletes(
    table: Any, content: DataFileContent, path: Path, rows: pa.Table | None = None, **facts: Any
) -> None:
    """Commit a delete file as Spark and Flink do: the Python package has no method for it, but writes the manifest.

    rows: what to write to the path; None: it is there.
    """
    if rows is not None:
        pq.write_table(rows, path)
    values: dict[str, Any] = {"file_format": FileFormat.PARQUET, "partition": Record(), **facts}
    values |= {"file_path": f"file://{path}", "file_size_in_bytes": path.stat().st_size, "record_count": 1}
    unknown = "column_sizes value_counts null_value_counts nan_value_counts lower_bounds upper_bounds"
    file = DataFile.from_args(content=content, **{name: {} for name in unknown.split()}, **values)
    file.spec_id = table.spec().spec_id
    with (
        pytest.MonkeyPatch.context() as patch,
        table.transaction() as transaction,
        transaction.update_snapshot().fast_append() as append,
    ):
        patch.setattr(ManifestWriterV2, "content", lambda writer: ManifestContent.DELETES)
        append.append_data_file(file)


def with_ids(rows: pa.Table, **ids: int) -> pa.Table:
    """The columns that are named, with the ids of their fields."""
    fields = [rows.field(name).with_metadata({"PARQUET:field_id": str(ids[name])}) for name in ids]
    return pa.table([rows[name] for name in ids], pa.schema(fields))


def write_puffin(path: Path, data_file: str, rows: list[int]) -> None:
    """A deletion vector, as engines write them for tables of version 3."""
    vector = b"\xd1\xd3\x39\x64" + struct.pack("<QI", 1, 0) + BitMap(rows).serialize()
    blob = struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
    about = {"type": "deletion-vector-v1", "fields": [], "snapshot-id": 1, "sequence-number": 1, "offset": 4}
    about |= {"length": len(blob), "properties": {"referenced-data-file": data_file}}
    footer = json.dumps({"blobs": [about]}).encode()
    path.write_bytes(b"PFA1" + blob + b"PFA1" + footer + struct.pack("<II", len(footer), 0) + b"PFA1")


def test_rows_of_iceberg_that_are_deleted_by_position_are_left_out(catalog: Any, tmp_path: Path) -> None:
    """By Parquet files, and by deletion vectors."""
    table = make_table(catalog, make_rows(0))
    table.append(make_rows(ROWS))
    files = [task.file for task in table.scan().plan_files()]
    (name,) = (file.file_path for file in files if file.lower_bounds[1] == bytes(8))
    rows = pa.table({"file_path": [name, "another", name], "pos": [3, 4, ROWS - 1]})
    commit_deletes(table, DataFileContent.POSITION_DELETES, tmp_path / "deletes.parquet", rows)
    kept = [(x,) for x in range(2 * ROWS) if x not in (3, ROWS - 1)]
    assert read_rows(table, ["x"]) == kept
    puffin = tmp_path / "deletes.puffin"
    write_puffin(puffin, name, [0, 3, 4])
    commit_deletes(table, DataFileContent.POSITION_DELETES, puffin, file_format=FileFormat.PUFFIN)
    assert read_rows(table, ["x"]) == [row for row in kept if row[0] not in (0, 4)]
    for path in (tmp_path / "n" / "t" / "metadata").glob("*-m0.avro"):
        path.unlink()
    with pytest.raises(InvalidInput, match=r"snapshot \d+ of the Iceberg table .* cannot be read: "):
        read_snapshot(table, None, {})


def test_rows_of_iceberg_that_are_deleted_by_equality_are_left_out(catalog: Any, tmp_path: Path) -> None:
    """As Flink deletes and upserts them: of files that were there before, with nulls, whatever columns are called."""
    kind = pa.array([None, "a", "b"] * (ROWS // 3) + ["a", None], pa.string())
    rows = make_rows(0, kind=kind)
    table = make_table(catalog, rows)
    first = table.current_snapshot().snapshot_id
    pairs = with_ids(pa.table({"x": [3, 4, 5, 6], "kind": [None, "a", "z", "a"]}), x=1, kind=3)
    deletes = DataFileContent.EQUALITY_DELETES
    commit_deletes(table, deletes, tmp_path / "pairs.parquet", pairs, equality_ids=[3, 1])
    kept = [x for x in range(ROWS) if x not in (3, 4)]
    assert read_rows(table, ["x", "y"]) == [(x, x * 0.5) for x in kept]
    table.append(rows.slice(0, 9))  # 3 and 4 are there again
    with table.update_schema() as change:
        change.rename_column("x", "number")
        change.add_column("late", LongType())
    assert len(read_rows(table, ["number"])) == len(kept) + 9
    # What counts are the ids: the file's other columns and their names do not.
    for number, (values, ids) in enumerate([({"a": [7, 8, 8], "b": [0, 0, 0]}, [1]), ({"late": [7]}, [4])]):
        named = dict(zip(values, [*ids, 2], strict=False))
        path = tmp_path / f"{number}.parquet"
        commit_deletes(table, deletes, path, with_ids(pa.table(values), **named), equality_ids=ids)
    left = [x for x in (*kept, *range(9)) if x not in (7, 8)]
    assert read_rows(table, ["number"]) == [(x,) for x in sorted(left)]
    assert len(read_rows(table, ["x"], first)) == ROWS
    where = Predicate.parse([("number", "<", 5)])
    assert read_rows(table, ["number"], where=where) == [(x,) for x in (0, 0, 1, 1, 2, 2, 3, 4)]
    late = with_ids(pa.table({"late": pa.array([None], pa.int64())}), late=4)
    commit_deletes(table, deletes, tmp_path / "all.parquet", late, equality_ids=[4])
    with pytest.raises(InvalidInput, match="have no rows: nothing to train on"):
        read_rows(table, ["number"])


def keep_columns(table: Any, names: list[str]) -> None:
    """Write the table's files again with these columns alone, as those that came from Hive."""
    for task in table.scan().plan_files():
        path = task.file.file_path.removeprefix("file://")
        pq.write_table(pq.read_table(path).select(names), path)


def test_deletes_by_equality_stay_in_their_partition(catalog: Any, tmp_path: Path) -> None:
    """Those of an unpartitioned spec do not; a file that came from Hive has a partition's value in its path alone."""
    rows = make_rows(0, 6, kind=["a", "b"] * 3, more=pa.array([7] * 6, pa.int32()))
    table = make_table(catalog, rows, "kind")
    keep_columns(table, ["x", "y", "more"])
    deletes, values = DataFileContent.EQUALITY_DELETES, pa.table({"more": pa.array([7], pa.int64())})
    facts = {"partition": Record("b"), "equality_ids": [4]}
    commit_deletes(table, deletes, tmp_path / "of_b.parquet", with_ids(values, more=4), **facts)
    assert read_rows(table, ["x", "kind"], transformed=True) == [(0, "a"), (2, "a"), (4, "a")]
    with table.update_spec() as change:
        change.remove_field("kind")
    values = with_ids(pa.table({"kind": ["a", "b"], "x": [2, 4]}), kind=3, x=1)
    commit_deletes(table, deletes, tmp_path / "all.parquet", values, equality_ids=[1, 3])
    assert read_rows(table, ["x"]) == [(0,), (4,)]


def test_delete_files_that_cannot_be_read_or_compared_are_refused(catalog: Any, tmp_path: Path) -> None:
    table = make_table(catalog, make_rows(0))
    first = table.current_snapshot().snapshot_id
    deletes, path = DataFileContent.EQUALITY_DELETES, tmp_path / "deletes.parquet"
    avro = {"file_format": FileFormat.AVRO, "equality_ids": [1]}
    texts = with_ids(pa.table({"x": ["seven"]}), x=1)
    for values, facts, says in [
        (texts, {"equality_ids": [9]}, "deletes rows by fields of structs, which cannot be compared"),
        (texts, {"equality_ids": [1]}, "deleted by the values of columns, which cannot be compared"),
        (texts, avro, "has the format AVRO, and only Parquet and Puffin are read"),
    ]:
        commit_deletes(table, deletes, path, values, **facts)
        remedy = "rewrite the table's data files, or fit on a DataFrame"
        with pytest.raises(InvalidInput, match=f"{says}.*: {remedy}"):
            read_snapshot(table, None, {})
        with table.manage_snapshots() as change:
            change.rollback_to_snapshot(first)


def test_partitions_of_iceberg_may_have_any_text(catalog: Any) -> None:
    rows = make_rows(0, 6, kind=["a/b", "c d", "e%20f", "g#h?i", "é", "+"])
    table = make_table(catalog, rows, "kind")
    assert read_rows(table, ["x", "kind"], transformed=True) == expect(rows, ["x", "kind"])


def test_files_that_came_from_hive_have_their_partitions_values(catalog: Any, tmp_path: Path) -> None:
    """Their rows lack the columns that they were partitioned by; what Iceberg itself wrote later has them."""
    day = pa.array([19000] * 3 + [19001] * 3, pa.int32()).cast(pa.date32())
    rows = make_rows(0, 6, kind=["01", "02"] * 3, year=pa.array([2023] * 6, pa.int32()), day=day)
    table = make_table(catalog, rows, "kind", "year", "day")
    keep_columns(table, ["x", "y"])
    columns = ["x", "kind", "year", "day"]
    found = read_rows(table, columns, transformed=True)
    assert found == expect(rows, columns)
    table.append(rows.slice(0, 1))
    assert read_rows(table, columns, transformed=True) == sorted([*found, found[0]])
    where = Predicate.parse([("kind", "==", "01"), ("day", ">=", date(2022, 1, 9))])
    snapshot = read_snapshot(table, None, {})
    manifest = describe_files(snapshot.store, snapshot.files, ["x"], where=where)
    assert manifest.rows == 1


def test_files_from_before_a_column_got_a_wider_type_are_read_beside_later_ones(catalog: Any) -> None:
    price = pa.array([Decimal("1.50"), Decimal("2.25")], pa.decimal128(5, 2))
    arrays = pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int32())))
    n, f = pa.array([1, 2], pa.int32()), pa.array([0.5, 0.25], pa.float32())
    table = make_table(catalog, make_rows(0, 2, n=n, f=f, price=price, a=arrays))
    with table.update_schema() as change:
        change.update_column("n", LongType())
        change.update_column("f", DoubleType())
        change.update_column("price", DecimalType(12, 2))
        change.update_column("a.element.element", LongType())
    arrays = pa.array([[[5, 1 << 40]], [[7, 8]]])
    later = make_rows(2, 2, n=[3, 1 << 40], f=[0.1, 1e300], price=price.cast(pa.decimal128(12, 2)), a=arrays)
    table.append(later)
    columns = ["x", "n", "f", "price", "a"]
    snapshot = read_snapshot(table, None, {})
    described = describe_files(snapshot.store, snapshot.files, columns).columns
    assert [each.dtype for each in described] == ["int64", "int64", "float64", "float64", "int64"]
    assert read_rows(table, columns) == expect(table.scan().to_arrow(), columns)
    where = Predicate.parse([("n", ">", 1), ("f", "<=", 0.25)])
    assert read_rows(table, ["n"], where=where) == [(2,), (3,)]


# ---- what is no table


def test_a_version_or_a_metadata_file_that_is_none_gets_a_sentence(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), make_rows(0, 1))
    wrong: Any
    for wrong in ("latest", "6537518479394777354", 1.5, True):
        with pytest.raises(InvalidInput, match="version must be a version of Delta or the id of a snapshot"):
            read_snapshot(tmp_path, wrong, {})
    for version in (-1, 1 << 64, 5):
        with pytest.raises(InvalidInput, match=f"of version {version}: its newest version is 0[.]$"):
            read_snapshot(tmp_path, version, {})
    with pytest.raises(InvalidInput, match=r"table of .*none\.metadata\.json cannot be read: "):
        read_snapshot(tmp_path / "none.metadata.json", None, {})


def make_session(answers: dict[str, Any]) -> Any:
    """A session that knows each table. answers: of `sql`, pairs in place of rows."""
    keys = {"DESCRIBE": ("col_name", "data_type"), "SHOW": ("key", "value")}

    def answer(text: str) -> Any:
        rows = [dict(zip(keys[text.partition(" ")[0]], pair, strict=True)) for pair in answers[text]]
        return SimpleNamespace(collect=lambda: rows)

    return SimpleNamespace(catalog=SimpleNamespace(tableExists=lambda name: True), sql=answer)


def open_named(session: Any, name: str) -> FileRows:
    return open_table_rows(session, name, None, None, {}, Selection.parse(None, None))


def test_what_spark_s_catalog_has_and_cannot_be_read_gets_a_sentence(
    catalog: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = catalog.create_table("n.t", make_rows(0).schema).location().removeprefix("file://")
    properties = [("current-snapshot-id", "none")]
    answers: dict[str, Any] = {"SHOW TBLPROPERTIES n.t": properties}
    answers["DESCRIBE TABLE EXTENDED n.t"] = [("Provider", "iceberg"), ("Location", location)]
    session = make_session(answers | {"DESCRIBE TABLE EXTENDED v": [("x", "bigint")]})
    with pytest.raises(InvalidInput, match="has no snapshot: it has none"):
        open_named(session, "n.t")
    with pytest.raises(InvalidInput, match=r"v is a view.*: fit on spark.table\('v'\)"):
        open_named(session, "v")
    monkeypatch.chdir(tmp_path)
    for name in ("my-table", "my table", "..", "a`b"):  # relative folders are no names there
        with pytest.raises(InvalidInput, match="There is no table of Delta or Iceberg in"):
            open_named(SimpleNamespace(), name)


def test_a_folder_without_a_table_and_a_missing_package_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"There is no table of Delta or Iceberg in .*fit_on_parquet"):
        read_snapshot(tmp_path, None, {})
    write_deltalake(str(tmp_path), make_rows(0, 3))
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidInput, match="pip install deltalake"):
        read_snapshot(tmp_path, None, {})
