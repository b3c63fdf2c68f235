"""The rows of a fit: which tables and files are taken, which must be written, what a run records and checks of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import DoubleType, StringType, StructType

from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.errors import CoordinatorLost, InvalidInput, JobCancelled, JobFailed
from spark_elastic.estimators.dataframe_rows import DataFrameRows, find_obstacle
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.estimators.fit_rows import (
    FileRows,
    RunRecord,
    choose_group_bytes,
    locate_rows,
    materialize_rows,
    plan_rows,
)
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.runs.checkpoint import OwnedRun
from tests.unit.estimators.requests import request


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (SimpleNamespace(isStreaming=True), "is a stream, which has no end: read its source with spark.read"),
        (pd.DataFrame({"x": [1.0]}), r"got pandas\.DataFrame: make one of it with spark\.createDataFrame"),
    ],
)
def test_what_is_no_table_is_refused(table: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        DataFrameRows(table).check(request())


@pytest.mark.parametrize(
    ("more", "sensitive", "refused"),
    [("X", "false", True), ("X", "TRUE", False), ("x", "true", True), ("z", "false", False)],
)
def test_columns_that_spark_cannot_tell_apart_are_refused(more: str, sensitive: str, refused: bool) -> None:
    schema = StructType().add("x", DoubleType()).add("y", DoubleType()).add(more, DoubleType())
    session = SimpleNamespace(conf={"spark.sql.caseSensitive": sensitive})
    table: Any = SimpleNamespace(isStreaming=False, schema=schema, columns=schema.names, sparkSession=session)
    if not refused:
        DataFrameRows(table).check(request(materialize="always"))
        return
    with pytest.raises(InvalidInput, match=rf"several columns called 'x' \(x, {more}\).* rename or drop one"):
        DataFrameRows(table).check(request(materialize="always"))


def test_a_validation_column_of_strings_is_refused() -> None:
    schema = StructType().add("x", DoubleType()).add("y", DoubleType()).add("part", StringType())
    table: Any = SimpleNamespace(isStreaming=False, schema=schema, columns=schema.names)
    with pytest.raises(InvalidInput, match="The validation column 'part' is string: it must be true, or a"):
        DataFrameRows(table).check(request(validation="part"))


@pytest.mark.parametrize(
    ("lanes", "batch", "planned"),
    [(None, 256, 14), (8, 256, 8), (64, 256, 64), (256, 300, 256), (256, 100, 100)],
)
def test_row_groups_of_as_many_lanes_fit_into_memory(lanes: int | None, batch: int, planned: int) -> None:
    asked = request(lanes=lanes)
    size = 2 * choose_group_bytes(asked)  # the largest that is left whole
    groups = RowGroups.of(RowGroup(0, number, size // 8, size) for number in range(500))
    manifest = Manifest((Column("x", "float64"),), ("a.parquet",), groups, "", "")
    plan = plan_rows(asked, manifest, batch, shuffle=True)
    assert plan.lanes == planned
    assert (plan.lanes + 2) * size <= DEFAULT_CACHE_BYTES


@pytest.mark.parametrize(
    "asked",
    [
        {"materialize": "never"},
        {"materialize": "never", "row_order": "table"},
        {"row_order": "table"},
        {"shuffle": False},
        {"row_order": "table", "terminate_on_nan": False, "missing": MissingValues(nans="keep")},
    ],
)
def test_rows_in_the_table_s_own_order_may_stay_where_they_are(asked: dict[str, Any]) -> None:
    assert find_obstacle(request(**asked)) is None


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "the order of their hash sorts the rows"),
        ({"row_order": "hash", "shuffle": False}, "the order of their hash sorts the rows"),
        ({"row_order": "hash", "materialize": "never"}, "the order of their hash sorts the rows"),
        ({"row_order": "table", "validation": 0.2}, "validation splits the rows"),
        ({"row_order": "table", "validation": "seen"}, "validation splits the rows"),
        ({"row_order": "table", "missing": MissingValues("drop")}, "missing leaves out rows"),
        ({"row_order": "table", "missing": MissingValues(nans="drop")}, "missing leaves out rows"),
        ({"row_order": "table", "terminate_on_nan": False}, "NaN is looked for while rows are written"),
    ],
)
def test_rows_that_are_sorted_split_or_checked_are_written(asked: dict[str, Any], says: str) -> None:
    assert says in str(find_obstacle(request(**asked)))


# ---- existing files


SESSION: Any = SimpleNamespace()


def write(folder: Path, rows: int) -> str:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": [1.0] * rows, "y": [0] * rows}), folder / "a.parquet")
    return str(folder)


def locate(train: str, *seen: str) -> FileRows:
    rows = locate_rows(SESSION, [train], seen, {})
    rows.check(request())
    return rows


@pytest.mark.parametrize("given", [3, [3], pd.DataFrame({"x": [1.0]}), SimpleNamespace(columns=["x"])])
def test_what_is_no_path_is_refused(given: Any) -> None:
    for arguments in ((given,), ("there", given)):
        with pytest.raises(InvalidInput, match="fit_on_parquet takes paths of Parquet files or folders; got"):
            ElasticTorchEstimator().fit_on_parquet(*arguments)


def test_a_run_resumes_with_the_same_files_only(tmp_path: Path) -> None:
    train, seen, store = write(tmp_path / "t", 9), write(tmp_path / "v", 3), Store.open(str(tmp_path / "s"))
    for attempt in range(2):
        run = OwnedRun.acquire(store, "mine")
        with materialize_rows(locate(train, seen), request(), store, run) as (record, data):
            assert record.load_manifest().rows == 9
            assert [data.exists(name) for name in record.load_manifest().files] == [True]
            validating = record.load_validation()
            assert validating is not None
            assert validating[0].files == ("v/a.parquet",)
            assert RunRecord.load(store, "mine") == record, attempt
    assert not store.list("runs/mine/rows")
    write(tmp_path / "t", 10)
    with (
        pytest.raises(InvalidInput, match="began with other files than those now in file:"),
        materialize_rows(locate(train, seen), request(), store, OwnedRun.acquire(store, "mine")),
    ):
        pass
    assert (tmp_path / "t" / "a.parquet").exists()


def test_a_run_that_failed_at_once_leaves_the_files_alone(tmp_path: Path) -> None:
    train, store = write(tmp_path / "t", 9), Store.open(str(tmp_path / "s"))
    with pytest.raises(ZeroDivisionError):
        with materialize_rows(locate(train), request(), store, OwnedRun.acquire(store, "mine")):
            raise ZeroDivisionError
    assert RunRecord.load(store, "mine") is None
    assert (tmp_path / "t" / "a.parquet").exists()


@pytest.mark.parametrize(
    ("attempt", "error", "stays"),
    [
        (1, JobFailed("it raised"), False),
        (1, JobCancelled("slot job 2 was cancelled: the SparkContext was stopped"), True),
        (1, CoordinatorLost("its executor is lost"), True),
        (2, JobCancelled("the user cancelled it"), False),
        (2, ConnectionRefusedError("the JVM is gone"), True),
    ],
)
def test_r23_a_run_whose_driver_was_lost_stays_since_hosts_may_keep_its_state(
    tmp_path: Path, attempt: int, error: Exception, stays: bool
) -> None:
    train, store = write(tmp_path / "t", 9), Store.open(str(tmp_path / "s"))
    asked = request(run_id="mine", store=store.url)
    for _ in range(attempt):
        run = OwnedRun.acquire(store, "mine")
    with pytest.raises(type(error)):
        with materialize_rows(locate(train), asked, store, run):
            raise error
    assert (RunRecord.load(store, "mine") is not None) is stays


def test_r18_a_driver_that_lost_the_run_writes_and_removes_nothing_of_it(tmp_path: Path) -> None:
    train, store = write(tmp_path / "t", 9), Store.open(str(tmp_path / "s"))
    late, lost = OwnedRun.acquire(store, "mine"), OwnedRun.acquire(store, "mine")
    materialized = materialize_rows(locate(train), request(), store, late)
    with pytest.raises(JobCancelled, match="was taken over"), materialized:
        pass
    assert RunRecord.load(store, "mine") is None

    def lose_run() -> None:
        with materialize_rows(locate(train), request(), store, lost):
            OwnedRun.acquire(store, "mine")
            lost.check()

    with pytest.raises(JobCancelled, match="was taken over"):
        lose_run()
    assert RunRecord.load(store, "mine") is not None


@pytest.mark.parametrize(
    ("values", "says"),
    [({"validation": 0.2}, "give validation_paths"), ({"label_cols": ("z",)}, "There is no column 'z'")],
)
def test_options_of_frames_are_refused_for_files(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    rows = locate_rows(SESSION, [write(tmp_path / "t", 3)], [], {})
    with pytest.raises(InvalidInput, match=says):
        rows.check(request(**values))


def test_files_need_a_session_and_a_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="There is no active Spark session"):
        locate_rows(None, [str(tmp_path)], [], {})
    with pytest.raises(InvalidInput, match="paths is empty"):
        locate_rows(SESSION, [], [], {})


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        ([[1.0, 2.0]], [1], r"column 'x' is float64 of shape \(2,\) in validation_paths"),
        ([1.0], [1.5], "column 'y' is float64 of shape .* and int64 of"),
        (pa.array([1.0], "float32"), pa.array([1], "int32"), None),
    ],
)
def test_validation_files_need_the_training_columns(tmp_path: Path, x: Any, y: Any, says: str | None) -> None:
    train, folder = write(tmp_path / "t", 3), tmp_path / "v"
    folder.mkdir()
    pq.write_table(pa.table({"x": x, "y": y}), folder / "a.parquet")
    with nullcontext() if says is None else pytest.raises(InvalidInput, match=says):
        locate(train, str(folder))


@pytest.mark.parametrize(
    ("entry", "kind", "way"),
    [
        ("_delta_log/00000000000000000000.json", "delta", "fit_on_table"),
        ("metadata/v1.metadata.json", "iceberg", "fit_on_table"),
        (".hoodie/hoodie.properties", "hudi", r"fit\(spark.read.format\('hudi'\)"),
    ],
)
def test_a_folder_of_a_table_with_a_log_is_refused(tmp_path: Path, entry: str, kind: str, way: str) -> None:
    train = write(tmp_path / "t", 3)
    locate(train)
    (tmp_path / "t" / entry).parent.mkdir()
    (tmp_path / "t" / entry).write_text("{}")
    with pytest.raises(InvalidInput, match=rf"holds a table of {kind}, .* train with {way}"):
        locate(train)


def test_a_part_of_a_table_with_a_log_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "table" / "year=1").mkdir(parents=True)
    part = write(tmp_path / "table" / "year=1" / "month=2", 3)
    locate(part)
    (tmp_path / "table" / "_delta_log").mkdir()
    (tmp_path / "table" / "_delta_log" / "00000000000000000000.json").write_text("{}")
    for path in (part, f"{part}/a.parquet"):
        says = rf"lie in file://{tmp_path}/table, a table of delta, .* fit_on_table"
        with pytest.raises(InvalidInput, match=says):
            locate(path)
    locate(write(tmp_path / "beside", 3))
