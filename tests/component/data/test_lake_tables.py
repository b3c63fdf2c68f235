"""Tables of Delta and Iceberg, made by the formats' own packages: what is read is what these packages read."""

from __future__ import annotations

import base64
import json
import struct
import sys
import time
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.utils.concurrent import ExecutorFactory
from pyroaring import BitMap

from spark_elastic.data.existing_parquet import describe_files
from spark_elastic.data.lake_tables import join_stores, read_snapshot
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.predicate import Predicate
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.errors import InvalidInput, StoreError
from tests.leaks import SessionOwned

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
    manifest = Manifest.from_json(manifest.to_json())
    with ArrowReader(snapshot.store, manifest, columns) as reader:
        groups = [reader.fetch(group) for group in range(len(manifest.row_groups))]
        found = [dict(group) for group in groups]
    assert [len(group[columns[0]]) for group in found] == list(manifest.group_rows)
    return sorted(
        row for group in found for row in zip(*(group[name].tolist() for name in columns), strict=True)
    )


def expect(table: pa.Table, columns: list[str]) -> list[tuple[Any, ...]]:
    return sorted(zip(*(table[name].to_pylist() for name in columns), strict=True))


# ---- Delta


def delete_by_vector(folder: Path, path: str, rows: list[int]) -> None:
    """Commit a deletion vector for a file, as Spark's connector does and the Python package cannot."""
    bitmap = BitMap(rows).serialize()
    vector = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    vector += bytes(-len(vector) % 4)
    table = DeltaTable(folder)
    (add,) = (each for each in pa.table(table.get_add_actions()).to_pylist() if each["path"] == path)
    entry = {
        "path": path,
        "partitionValues": {},
        "size": add["size_bytes"],
        "modificationTime": add["modification_time"],
        "dataChange": True,
        "stats": json.dumps({"numRecords": add["num_records"], "tightBounds": False}),
        "deletionVector": {
            "storageType": "i",
            "pathOrInlineDv": encode_z85(vector),
            "sizeInBytes": len(vector),
            "cardinality": len(rows),
        },
    }
    remove = {"path": path, "deletionTimestamp": int(time.time() * 1000), "dataChange": True}
    features = {"minReaderVersion": 3, "minWriterVersion": 7}
    names = ["deletionVectors"]
    lines = [
        {"protocol": {**features, "readerFeatures": names, "writerFeatures": names}},
        {"remove": remove},
        {"add": entry},
    ]
    log = folder / "_delta_log" / f"{table.version() + 1:020}.json"
    log.write_text("\n".join(json.dumps(line) for line in lines))


def encode_z85(data: bytes) -> str:
    """ZeroMQ's base 85: that of base64.b85encode, with other signs."""
    usual = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    return base64.b85encode(data).decode().translate(str.maketrans(usual, z85))


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
    DeltaTable(folder).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(StoreError, match=r"has no 'part-.*\.parquet'"):
        read_rows(folder, ["x", "y"], 1)


def test_partition_columns_of_delta_are_read_with_their_values(tmp_path: Path) -> None:
    rows = make_rows(
        0,
        6,
        year=pa.array([2023, 2023, 2024, 2024, 2025, 2025], pa.int32()),
        big=[True, False, True, False, True, False],
        name=["a b", "ä/%", "c=d", "a b", "ä/%", "c=d"],
    )
    write_deltalake(str(tmp_path), rows, partition_by=["year", "big", "name"])
    columns = ["x", "year", "big", "name"]
    assert read_rows(tmp_path, columns, transformed=True) == expect(rows, columns)
    nulls = make_rows(6, 1, year=pa.array([None], pa.int32()), big=[True], name=["z"])
    write_deltalake(str(tmp_path), nulls, partition_by=["year", "big", "name"], mode="append")
    with pytest.raises(InvalidInput, match="The column 'year' has 1 nulls in 7 rows"):
        read_rows(tmp_path, ["x", "year"])
    assert len(read_rows(tmp_path, ["x", "big"])) == 7


@pytest.mark.parametrize("piece_bytes", [1 << 30, 1000])
def test_rows_that_a_deletion_vector_names_are_left_out(tmp_path: Path, piece_bytes: int) -> None:
    """Also where a row group is cut into pieces, of which some lose all their rows."""
    write_deltalake(str(tmp_path), make_rows(0))
    write_deltalake(str(tmp_path), make_rows(ROWS), mode="append")
    table = DeltaTable(tmp_path)
    path = next(
        each["path"] for each in pa.table(table.get_add_actions()).to_pylist() if each["min"]["x"] == 0
    )
    deleted = [*range(7), *range(300, 1200), ROWS - 1]
    delete_by_vector(tmp_path, path, deleted)
    kept = [x for x in range(2 * ROWS) if x not in set(deleted)]
    assert read_rows(tmp_path, ["x", "y"], piece_bytes=piece_bytes) == [(x, x * 0.5) for x in kept]
    assert len(read_rows(tmp_path, ["x"], 1, piece_bytes=piece_bytes)) == 2 * ROWS


def test_columns_of_delta_are_found_by_their_physical_names(tmp_path: Path) -> None:
    """A table as Databricks writes it after a column was renamed."""
    write_deltalake(str(tmp_path), make_rows(0).rename_columns(["col-1", "y"]))
    (log,) = (tmp_path / "_delta_log").glob("*.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "metaData" in line:
            schema = json.loads(line["metaData"]["schemaString"])
            for number, field in enumerate(schema["fields"]):
                physical = {
                    "delta.columnMapping.id": number + 1,
                    "delta.columnMapping.physicalName": field["name"],
                }
                field.update(metadata=physical, name={"col-1": "x"}.get(field["name"], field["name"]))
            mode = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"}
            line["metaData"].update(schemaString=json.dumps(schema), configuration=mode)
        if "protocol" in line:
            line["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
    log.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_rows(tmp_path, ["x", "y"]) == [(x, x * 0.5) for x in range(ROWS)]
    with pytest.raises(InvalidInput, match=r"There is no column 'col-1' in .*: it has .*x"):
        read_rows(tmp_path, ["col-1"])


def test_two_tables_are_read_from_the_folder_that_holds_both(tmp_path: Path) -> None:
    for name in ("train", "seen"):
        write_deltalake(str(tmp_path / name), make_rows(0, 3))
    store, parts = join_stores([read_snapshot(tmp_path / name, None, {}) for name in ("train", "seen")])
    assert store.url == f"file://{tmp_path}"
    assert [describe_files(store, files, ["x"]).files[0].partition("/")[0] for files in parts] == [
        "train",
        "seen",
    ]


# ---- Iceberg


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Any]:
    catalog = SqlCatalog("own", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("n")
    yield catalog
    catalog.close()
    ExecutorFactory.get_or_create().shutdown()  # pyiceberg keeps its threads otherwise
    ExecutorFactory._instance = None


def test_an_iceberg_snapshot_is_read_whatever_is_written_to_the_table_later(
    catalog: Any, tmp_path: Path
) -> None:
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
    assert (
        read_rows(tmp_path / "n" / "t", ["x", "label"])
        == read_rows(table.metadata_location, ["x", "label"])
        == after
    )
    for version in (first, moment, moment.isoformat()):
        assert read_rows(table, ["x", "y"], version) == before
    with pytest.raises(InvalidInput, match=r"has no snapshot 5: it has \d+, "):
        read_snapshot(table, 5, {})


def test_rows_that_position_deletes_name_are_left_out_and_equality_deletes_are_refused(
    catalog: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delete files are such as Spark writes; the Python package cannot commit them, so they come with the plan."""
    table = catalog.create_table("n.t", make_rows(0).schema)
    table.append(make_rows(0))
    (task,) = table.scan().plan_files()
    name = task.file.file_path
    rows = pa.table({"file_path": [name, "another", name], "pos": [3, 4, ROWS - 1]})
    pq.write_table(rows, tmp_path / "deletes.parquet")
    deletes = SimpleNamespace(
        content=DataFileContent.POSITION_DELETES,
        file_format=FileFormat.PARQUET,
        file_path=f"file://{tmp_path}/deletes.parquet",
    )
    planned = SimpleNamespace(file=task.file, delete_files={"one": deletes}.values())
    monkeypatch.setattr("pyiceberg.table.DataScan.plan_files", lambda scan: [planned])
    assert read_rows(table, ["x"]) == [(x,) for x in range(ROWS) if x not in (3, ROWS - 1)]
    deletes.content = DataFileContent.EQUALITY_DELETES
    with pytest.raises(
        InvalidInput, match=r"has rows that are deleted by equality .*: rewrite the table's data files"
    ):
        read_snapshot(table, None, {})


def test_files_that_came_from_hive_have_their_partitions_values(catalog: Any, tmp_path: Path) -> None:
    """Their rows lack the columns that they were partitioned by; what Iceberg itself wrote later has them."""
    day = pa.array([19000] * 3 + [19001] * 3, pa.int32()).cast(pa.date32())
    rows = make_rows(
        0, 6, kind=["a", "b", "a", "b", "a", "b"], year=pa.array([2023] * 6, pa.int32()), day=day
    )
    table = catalog.create_table("n.t", rows.schema)
    with table.update_spec() as change:
        for name in ("kind", "year", "day"):
            change.add_identity(name)
    table.append(rows)
    for task in table.scan().plan_files():
        path = task.file.file_path.removeprefix("file://")
        pq.write_table(pq.read_table(path).select(["x", "y"]), path)
    columns = ["x", "kind", "year", "day"]
    found = read_rows(table, columns, transformed=True)
    assert found == [(x, kind, year, str(day)) for x, kind, year, day in expect(rows, columns)]
    table.append(rows.slice(0, 1))
    assert read_rows(table, ["x", "year", "kind"], transformed=True) == expect(
        pa.concat_tables([rows, rows.slice(0, 1)]), ["x", "year", "kind"]
    )
    where = Predicate.parse([("kind", "==", "a"), ("day", ">=", date(2022, 1, 9))])
    snapshot = read_snapshot(table, None, {})
    manifest = describe_files(snapshot.store, snapshot.files, ["x"], where=where)
    assert manifest.rows == 1


# ---- what is no table


def test_a_folder_without_a_table_and_a_missing_package_get_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"There is no table of Delta or Iceberg in .*fit_on_parquet"):
        read_snapshot(tmp_path, None, {})
    write_deltalake(str(tmp_path), make_rows(0, 3))
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidInput, match="pip install deltalake"):
        read_snapshot(tmp_path, None, {})
