"""`fit(df)` on the files that a DataFrame scans, without a copy: for which plans, and what may happen to the files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, JobFailed, StoreError
from spark_elastic.estimators.dataframes import file_scan
from spark_elastic.estimators.dataframes.file_scan import NoFileScan, find_file_scan
from spark_elastic.tables.existing_parquet import describe_parquet
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster
from tests.spark.estimators import ROWS, compute_mse, estimator, is_close, table, train_plain
from tests.spark.fits import fit_through_a_loss

pytestmark = [
    pytest.mark.usefixtures("nets_pickled_by_value"),
    pytest.mark.spark,
    pytest.mark.native,
    pytest.mark.timeout(900),
]


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Path:
    """The rows of `table`, in two files, under other names than the estimator's."""
    rows = table(spark).collect()
    path = tmp_path / "table"
    path.mkdir()
    for number, part in enumerate((rows[: ROWS // 3], rows[ROWS // 3 :])):
        columns = {name: [row[name] for row in part] for name in ("id", "x", "y")}
        written = pa.table(columns).rename_columns(["id", "features", "price"])
        pq.write_table(written, path / f"{number}.parquet")
    return path


def read(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.read.parquet(str(folder)).select(F.col("features").alias("x"), F.col("price").alias("y"))


def read_view(df: DataFrame) -> DataFrame:
    df.createOrReplaceTempView("shown")
    return df.sparkSession.table("shown")


SCANS: list[Callable[[DataFrame], DataFrame]] = [
    lambda df: df,
    lambda df: df.select("y", "x").select("x", "y"),
    lambda df: df.withColumn("unused", F.col("y") * 2),
    read_view,
]
OTHERS: list[tuple[Callable[[DataFrame], DataFrame], str]] = [
    (lambda df: df.where("y > 0"), r"its plan has Filter \(y"),
    (lambda df: df.withColumn("y", F.col("y") * 2), r"its plan has Project \[.*\* 2"),
    (lambda df: df.repartition(3), "its plan has Repartition 3"),
    (lambda df: df.limit(3), "its plan has GlobalLimit 3"),
    (lambda df: df.union(df), "its plan has Union"),
    (lambda df: df.distinct(), "its plan has Deduplicate"),
    (lambda df: df.orderBy("y"), "its plan has Sort"),
    (lambda df: df.cache(), "its plan has InMemoryRelation"),
]


def test_plans_of_real_dataframes_are_recognised(spark: SparkSession, folder: Path) -> None:
    df = read(spark, folder)
    for number, change in enumerate(SCANS):
        found = find_file_scan(change(df), ["x", "y"])
        assert found.columns == {"x": "features", "y": "price"}, number
        assert [url.rpartition("/")[2] for url in found.urls] == ["0.parquet", "1.parquet"]
    for change, says in OTHERS:
        with pytest.raises(NoFileScan, match=says):
            find_file_scan(change(df), ["x", "y"])
    for path in (folder, folder / "0.parquet"):
        with pytest.raises(NoFileScan, match="it reads a file several times"):
            find_file_scan(spark.read.parquet(str(folder), str(path)), ["features", "price"])
    spark.catalog.clearCache()


@pytest.mark.faults  # in every build test_tables.py loses an executor of a fit on files that others change
def test_p1_p2_a_fit_in_place_loses_an_executor_while_a_file_is_added(
    spark: SparkSession, standalone: StandaloneCluster, fault: Fault, folder: Path, tmp_path: Path
) -> None:
    def add_file(numbers: Mapping[str, Any]) -> None:
        if numbers["step"] and not (folder / "2.parquet").exists():
            (folder / "2.parquet").write_bytes((folder / "1.parquet").read_bytes())

    est, _ = fit_through_a_loss(
        spark,
        standalone,
        fault,
        tmp_path,
        workers=3,
        fit=lambda est: est.fit(read(spark, folder)),
        meanwhile=add_file,
        row_order="table",
    )
    assert (folder / "2.parquet").exists()
    assert not list((tmp_path / "store").rglob("*.parquet"))
    with pytest.raises(InvalidInput, match="'mine' began with other files than those now in"):
        est.fit(read(spark, folder))
    with pytest.raises(InvalidInput, match=r"'mine' began on the files in .*: continue with the same"):
        est.fit(read(spark, folder).where("y > 0"))


def test_a_column_that_is_in_the_files_and_in_their_paths_is_written_as_spark_reads_it(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    partition = tmp_path / "partitioned" / "price=3"
    partition.parent.mkdir()
    folder.rename(partition)
    df = read(spark, partition.parent)
    assert df.select("y").distinct().collect() == [(3,)]
    est = estimator(tmp_path / "store", epochs=1, row_order="table", materialize="never")
    with pytest.raises(InvalidInput, match="column 'y' is in the files and in their paths, too"):
        est.fit(df)


class Overwrites(logging.Handler):
    """Writes other rows to a file once the log says that a fit reads it where it is."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self._file = file
        self.threads: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "are read where they are: 2 files of Parquet" in record.getMessage():
            self.threads.append(threading.current_thread().name)
            rows = pq.read_table(self._file)
            pq.write_table(rows.set_column(2, "price", pa.array([7.0] * len(rows))), self._file)


def test_a_file_that_is_overwritten_under_a_fit_in_place_ends_it_with_its_name(
    spark: SparkSession, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spark_elastic")
    overwrites, log = Overwrites(folder / "0.parquet"), logging.getLogger("spark_elastic")
    log.addHandler(overwrites)
    try:
        with pytest.raises(JobFailed, match=r"'0\.parquet' in the store .* was written again after this run"):
            estimator(tmp_path / "store", row_order="table").fit(read(spark, folder))
    finally:
        log.removeHandler(overwrites)
    assert overwrites.threads


def test_materialize_says_whether_rows_are_written(
    spark: SparkSession, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spark_elastic")
    df = read(spark, folder)
    est = estimator(tmp_path / "store", epochs=1, num_workers=1, batch_size=ROWS, keep_data=True)

    def fits(df: DataFrame, **asked: Any) -> bool:
        """Whether rows were written; the weights are those of a plain loop."""
        caplog.clear()
        model = est.copy({getattr(est, name): value for name, value in asked.items()}).fit(df)
        assert is_close(model, train_plain(table(spark), 1, compute_mse))
        return bool(list((tmp_path / "store").rglob("*.parquet")))

    assert not fits(df, materialize="never")
    assert "the rows are read where they are: 2 files of Parquet in file://" in caplog.text
    assert not fits(df, row_order="table")
    for request, says in (
        ({"validation": 0.5}, "here validation splits the rows while they are written"),
        ({"row_order": "hash"}, "here the order of their hash sorts the rows"),
    ):
        with pytest.raises(InvalidInput, match=f"materialize='never' .*{says}"):
            fits(df, materialize="never", **request)
    with pytest.raises(InvalidInput, match=r"materialize='never' .* isnotnull\(.*use materialize='auto'"):
        fits(df.where("y is not null"), materialize="never")
    narrow = spark.read.schema("features array<double>, price float").parquet(str(folder))
    with pytest.raises(InvalidInput, match="column 'y' is float64 of 0 dimensions in the files, and float32"):
        fits(narrow.toDF("x", "y"), materialize="never")
    assert fits(df)
    assert "the rows are written to the store, because the order of their hash" in caplog.text


# ---- footers that a Spark job reads

FILES = 12


@pytest.fixture
def many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_scan, "MANY_FILES", 4)
    monkeypatch.setattr(file_scan, "FILES_PER_TASK", 5)
    for number in range(FILES):
        ids = np.arange(20) + 20 * number
        rows = pa.table({"id": ids, "x": pa.array([[i, i] for i in ids], pa.list_(pa.float32()))})
        place = tmp_path / f"part={number % 2}"
        place.mkdir(exist_ok=True)
        pq.write_table(rows, place / f"{number}.parquet", row_group_size=8)
    return tmp_path


def test_executors_describe_files_as_the_driver_does(spark: SparkSession, many_files: Path) -> None:
    store, columns = Store.open(str(many_files)), ["id", "x", "part"]
    collect = file_scan.make_footer_collector(spark)
    for options in {}, {"piece_bytes": 32}:
        alone = describe_parquet(store, columns, **options)
        assert describe_parquet(store, columns, collect=collect, **options) == alone


def test_errors_of_executors_are_those_of_the_driver(spark: SparkSession, many_files: Path) -> None:
    store, collect = Store.open(str(many_files)), file_scan.make_footer_collector(spark)
    with pytest.raises(InvalidInput, match="There is no column 'z'"):
        describe_parquet(store, ["z"], collect=collect)
    (many_files / "part=1" / "7.parquet").write_bytes(b"no Parquet")
    with pytest.raises(StoreError, match=r"'part=1/7.parquet' in the store .* is no Parquet file") as raised:
        describe_parquet(store, ["id"], collect=collect)
    assert "\n" not in str(raised.value)


def test_executors_without_the_package_leave_the_footers_to_the_driver(
    spark: SparkSession, many_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'a_package_that_no_executor_has'")

    monkeypatch.setattr(file_scan, "_read_part", fail)
    store = Store.open(str(many_files))
    collect = file_scan.make_footer_collector(spark)
    assert describe_parquet(store, ["id"], collect=collect).rows == 20 * FILES
