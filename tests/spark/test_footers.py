"""Footers read by a Spark job: the same as in the driver, and the same errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.tables.existing_parquet import describe_parquet

pytestmark = pytest.mark.spark
FILES = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from spark_elastic.estimators.dataframes import file_scan as footers

    monkeypatch.setattr(footers, "MANY_FILES", 4)
    monkeypatch.setattr(footers, "FILES_PER_TASK", 5)
    for number in range(FILES):
        ids = np.arange(20) + 20 * number
        table = pa.table({"id": ids, "x": pa.array([[i, i] for i in ids], pa.list_(pa.float32()))})
        place = tmp_path / f"part={number % 2}"
        place.mkdir(exist_ok=True)
        pq.write_table(table, place / f"{number}.parquet", row_group_size=8)
    return tmp_path


def test_executors_describe_files_as_the_driver_does(spark: SparkSession, folder: Path) -> None:
    from spark_elastic.estimators.dataframes.file_scan import make_footer_collector

    store, columns = Store.open(str(folder)), ["id", "x", "part"]
    collect = make_footer_collector(spark)
    assert describe_parquet(store, columns, collect=collect) == describe_parquet(store, columns)
    assert describe_parquet(store, columns, collect=collect, piece_bytes=32) == describe_parquet(
        store, columns, piece_bytes=32
    )


def test_errors_of_executors_are_those_of_the_driver(spark: SparkSession, folder: Path) -> None:
    from spark_elastic.estimators.dataframes.file_scan import make_footer_collector

    store, collect = Store.open(str(folder)), make_footer_collector(spark)
    with pytest.raises(InvalidInput, match="There is no column 'z'"):
        describe_parquet(store, ["z"], collect=collect)
    (folder / "part=1" / "7.parquet").write_bytes(b"no Parquet")
    with pytest.raises(StoreError, match=r"'part=1/7.parquet' in the store .* is no Parquet file") as raised:
        describe_parquet(store, ["id"], collect=collect)
    assert "\n" not in str(raised.value)


def test_executors_without_the_package_leave_the_footers_to_the_driver(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_elastic.estimators.dataframes import file_scan as footers

    def fail(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'a_package_that_no_executor_has'")

    monkeypatch.setattr(footers, "_read_part", fail)
    store = Store.open(str(folder))
    collect = footers.make_footer_collector(spark)
    assert describe_parquet(store, ["id"], collect=collect).rows == 20 * FILES
