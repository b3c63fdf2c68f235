"""The order of rows on real Spark: the rows decide it, not how many partitions they come in."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.data.store import Store
from spark_elastic.estimators.dataframes import materialize as row_order
from spark_elastic.estimators.dataframes.materialize import (
    ValidationSplit,
    WriteOptions,
    materialize,
)
from spark_elastic.estimators.dataframes.scan import MissingValues
from tests.spark.estimators import estimator, table

pytestmark = pytest.mark.spark

Change = Callable[["DataFrame"], "DataFrame"]
Groups = list[dict[str, np.ndarray]]

# The same rows on another cluster, or as another plan.
AS_OTHERS_HAVE_THEM: list[Change] = [
    lambda df: df.repartition(1),
    lambda df: df.orderBy(F.desc("id")).cache(),
]
COLUMNS = ["x", "v", "m", "text", "tags", "day", "price", "odd"]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_order, "GROUPS_PER_FILE", 4)


def rows_of_every_kind(spark: SparkSession) -> DataFrame:
    """900 rows, 100 of them twice and 100 with NaN."""
    numbers = spark.range(0, 900, 1, 3).selectExpr("id", "id % 800 as n")
    df = numbers.selectExpr(
        "id",
        "if(n % 9 = 0, double('nan'), n / 7) as x",
        "array(double(n), -0.0d) as v",
        "array(array(n, -n), array(1L, n)) as m",
        "concat('row ', n) as text",
        "array(string(n), 'b') as tags",
        "date_add(date'1960-01-01', int(n)) as day",
        "cast(n / 4 as decimal(10, 2)) as price",
        "n % 2 = 1 as odd",
    )
    return df.withColumn("v", array_to_vector("v"))


def write(
    df: DataFrame, columns: list[str], store: Path, split: ValidationSplit | None = None, **options: Any
) -> tuple[list[Manifest], list[Groups]]:
    """The data sets, and the rows of their row groups."""
    opened = Store.open(str(store))
    written = WriteOptions(transformed=True, missing=MissingValues(nans="keep"), split=split, **options)
    manifests = [each for each in materialize(df, columns, opened, written) if each is not None]
    rows = []
    for manifest in manifests:
        with closing(ArrowReader(opened, manifest)) as reader:
            rows.append([dict(reader.fetch(group)) for group in range(len(manifest.row_groups))])
    return manifests, rows


def equal(one: Groups, other: Groups) -> bool:
    return len(one) == len(other) and all(
        repr(a[name].tolist()) == repr(b[name].tolist())
        for a, b in zip(one, other, strict=True)
        for name in a
    )


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("split", [None, pytest.param(ValidationSplit("odd"), marks=pytest.mark.faults)])
def test_p2_the_same_rows_are_in_the_same_order_whatever_partitions_they_come_in(
    spark: SparkSession, tmp_path: Path, split: ValidationSplit | None
) -> None:
    df = rows_of_every_kind(spark)
    manifests, rows = write(df, COLUMNS, tmp_path / "first", split, rows_per_group=50)
    assert sum(manifest.rows for manifest in manifests) == 900
    assert len(manifests[0].files) > 1
    for number, change in enumerate(AS_OTHERS_HAVE_THEM):
        again, found = write(change(df), COLUMNS, tmp_path / str(number), split, rows_per_group=50)
        assert [each.hash for each in again] == [each.hash for each in manifests], number
        assert all(map(equal, found, rows)), number
    spark.catalog.clearCache()
    other = df.withColumn("price", F.col("price") + 1)
    assert write(other, COLUMNS, tmp_path / "other", split, rows_per_group=50)[0][0].hash != manifests[0].hash


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("copies", [1, 3])
def test_p2_the_driver_merges_a_small_table_as_tasks_merge_a_large_one(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    split = ValidationSplit(0.2, seed=3)
    df = rows_of_every_kind(spark).where("id < 800").withColumn("at", F.expr("timestamp_micros(id - 400)"))
    df = df.withColumn("copy", F.explode(F.sequence(F.lit(1), F.lit(copies)))).drop("copy")
    manifests, rows = write(df, [*COLUMNS, "at"], tmp_path / "small", split, rows_per_group=50)
    assert len(manifests[0].files) > 2
    for limit in ("SMALL_BYTES", "_COPIED_ROWS"):  # below the first the driver still makes copies of few rows
        monkeypatch.setattr(row_order, limit, 0)
        others, found = write(df, [*COLUMNS, "at"], tmp_path / limit, split, rows_per_group=50)
        assert [each.hash for each in others] == [each.hash for each in manifests]
        assert all(map(equal, found, rows))


def test_p2_the_order_is_the_same_on_every_spark(spark: SparkSession, tmp_path: Path) -> None:
    _, (rows, validation) = write(spark.range(1000), ["id"], tmp_path, ValidationSplit(0.1, seed=3))
    assert rows[0]["id"][:8].tolist() == [922, 745, 459, 565, 411, 964, 468, 199]
    assert validation[0]["id"][:8].tolist() == [566, 682, 75, 233, 359, 898, 792, 14]


def test_p2_sums_that_differ_in_their_last_bit_leave_the_order(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(500).selectExpr("id", "id / 7 as x")
    near = df.withColumn("x", F.col("x") * (1 + 1e-15))
    _, rows = write(df, ["id", "x"], tmp_path / "a", ValidationSplit(0.3))
    _, found = write(near, ["id", "x"], tmp_path / "b", ValidationSplit(0.3))
    for one, other in zip(rows, found, strict=True):
        assert np.array_equal(one[0]["id"], other[0]["id"])
    assert not np.array_equal(rows[0][0]["x"], found[0][0]["x"])


def test_a_table_sorted_by_its_label_is_mixed_unless_refused(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(0, 4000, 1, 4).selectExpr("id", "int(id >= 2000) as label")
    _, (mixed,) = write(df, ["id", "label"], tmp_path, rows_per_group=500)
    assert all(0.4 < group["label"].mean() < 0.6 for group in mixed)
    _, (kept,) = write(df, ["id", "label"], tmp_path, rows_per_group=500, row_order="table")
    assert np.array_equal(np.concatenate([group["id"] for group in kept]), np.arange(4000))


@pytest.mark.usefixtures("small_files")
def test_copies_of_a_row_are_spread_over_all_row_groups(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = "int(if(id < 80000, 0, id % 10)) as x", "double(1) as `y z.`"
    df = spark.range(0, 90_000, 1, 3).selectExpr(x, y)
    (manifest,), (rows,) = write(df, df.columns, tmp_path / "a", rows_per_group=2000)
    assert len(manifest.files) == 12
    assert sum(np.bincount(group["x"], minlength=10) for group in rows).tolist() == [81_000] + [1000] * 9
    assert all(len(set(group["x"])) == 10 for group in rows if len(group["x"]) > 500)
    # Tasks make copies of a larger table before others merge.
    monkeypatch.setattr(row_order, "CHUNK_BYTES", 10_000)
    again, (found,) = write(df.repartition(5), df.columns, tmp_path / "b", rows_per_group=2000)
    assert again[0].hash == manifest.hash
    assert equal(found, rows)


def test_p2_copies_are_in_the_order_of_sparks_hash_of_them(spark: SparkSession, tmp_path: Path) -> None:
    more = {
        "at": "timestamp_micros(id - 40)",
        "small": "smallint(id)",
        "tiny": "if(id % 2 = 0, -1e-60, 1e300)",
    }
    changes = {name: F.expr(text) for name, text in {**more, "text": "repeat(text, int(id))"}.items()}
    kinds = rows_of_every_kind(spark).where("id < 60").withColumns(changes)
    df = kinds.crossJoin(spark.range(3).withColumnRenamed("id", "copy"))
    columns = [*COLUMNS, *more]
    _, (rows,) = write(df, columns, tmp_path, rows_per_group=200)
    narrow = {"x": "float(x)", "price": "float(double(price))", "tiny": "float(tiny)"}
    as_written = df.withColumns({name: F.expr(text) for name, text in narrow.items()})
    as_written = as_written.withColumn("v", vector_to_array("v", "float32"))
    ordered = as_written.orderBy(F.xxhash64(*columns, "copy")).select("small").collect()
    assert rows[0]["small"].tolist() == [row.small for row in ordered]


def test_rows_are_sorted_in_the_python_workers_of_later_slots(spark: SparkSession, tmp_path: Path) -> None:
    """Spark tells its Python workers apart by their variables: others would import anew what these have."""

    def digest_variables(*_: Any) -> int:
        return zlib.crc32(" ".join(sorted(os.environ)).encode())

    setting = "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"
    before = spark.conf.get(setting)
    (wanted,) = spark.sparkContext.parallelize([0], 1).map(digest_variables).collect()
    written = spark.range(1).select(F.udf(digest_variables, "long")("id").alias("variables"))
    _, ((group,),) = write(written, ["variables"], tmp_path)
    assert group["variables"].tolist() == [wanted]
    assert spark.conf.get(setting) == before


def test_p2_weights_do_not_depend_on_the_partitions_of_the_table(spark: SparkSession, tmp_path: Path) -> None:
    fits = [
        estimator(tmp_path, batch_size=8 // workers, num_workers=workers, epochs=2, validation=0.25).fit(df)
        for df, workers in ((table(spark).repartition(1), 2), (table(spark).orderBy("y"), 1))
    ]
    first, second = ([p.detach().numpy() for p in fit.model.parameters()] for fit in fits)
    assert all(np.abs(a - b).max() < 1e-9 for a, b in zip(first, second, strict=True))
    histories = [fit.getHistory() for fit in fits]
    for name in ("loss", "val_loss"):
        assert histories[0][name] == pytest.approx(histories[1][name], rel=1e-9)
