"""DataFrames to data sets on real Spark: shapes, exact row groups, reuse, and one sentence for each bad column."""

from __future__ import annotations

import shutil
import uuid
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reading.decoding import HAS_CHECKSUMS
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.dataframes import materialize as materialization
from spark_elastic.estimators.dataframes.materialize import (
    ValidationSplit,
    WriteOptions,
    find_difference,
    fingerprint_table,
    materialize,
)
from spark_elastic.estimators.dataframes.scan import _add_halves, _sum_halves
from tests.component.column_kinds import READERS
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster
from tests.spark.fits import fit_through_a_loss

pytestmark = pytest.mark.spark


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"file://{tmp_path}/the store of [1]")  # Spark takes brackets for a pattern


def write(
    df: DataFrame, columns: list[str], store: Store, rows: int = 10_000, row_order: str = "hash"
) -> Manifest:
    return materialize(df, columns, store, WriteOptions(rows_per_group=rows, row_order=row_order))[0]


def read(store: Store, manifest: Manifest) -> dict[str, np.ndarray]:
    with closing(ArrowReader(store, manifest)) as reader:
        groups = [reader.fetch(group) for group in range(len(manifest.row_groups))]
        return {c.name: np.concatenate([group[c.name] for group in groups]) for c in manifest.columns}


def test_every_kind_of_column_comes_back_as_arrays(spark: SparkSession, store: Store) -> None:
    vectors = [Vectors.dense([i, 1.0, 2.0]) if i % 2 else Vectors.sparse(3, {0: float(i)}) for i in range(25)]
    matrices = [[[float(i), 1.0], [2.0, 3.0], [4.0, 5.0]] for i in range(25)]
    rows = [(i, i / 4, i % 2 == 0, vectors[i], matrices[i], [i, -i]) for i in range(25)]
    df = spark.createDataFrame(rows, ["id", "a.b c", "odd", "v", "m", "k"])
    manifest = write(df, df.columns, store, rows=10)
    assert manifest.columns == (
        Column("id", "int64"),
        Column("a.b c", "float64"),
        Column("odd", "bool"),
        Column("v", "float32", (3,)),
        Column("m", "float64", (3, 2)),
        Column("k", "int64", (2,)),
    )
    found = read(store, manifest)
    order = np.argsort(found["id"])
    ids = np.arange(25)
    assert np.array_equal(found["id"][order], ids)
    assert np.array_equal(found["a.b c"][order], ids / 4)
    assert np.array_equal(found["odd"][order], ids % 2 == 0)
    assert np.array_equal(found["v"][order], np.stack([ids, ids % 2, 2 * (ids % 2)], axis=1))
    assert np.array_equal(found["m"][order][:, 0, 0], ids)
    assert np.array_equal(found["m"][order][:, 2], np.tile([4.0, 5.0], (25, 1)))
    assert np.array_equal(found["k"][order], np.stack([ids, -ids], axis=1))


@pytest.mark.parametrize("row_order", ["table", "hash"])
def test_arrays_of_different_lengths_are_written_for_a_transformation(
    spark: SparkSession, store: Store, row_order: str
) -> None:
    lengths = "id", "cast(id % 4 as int)"
    df = spark.range(200).selectExpr(
        lengths[0],
        f"slice(array(id, 1, 2, 3), 1, {lengths[1]}) as tokens",
        f"slice(array('a', 'bc', 'def'), 1, {lengths[1]}) as words",
        "array(id, 2) as pair",
    )
    options = WriteOptions(transformed=True, row_order=row_order, row_group_bytes=4000)
    manifest, _ = materialize(df, df.columns, store, options)
    assert manifest.columns == (
        Column("id", "int64"),
        Column("tokens", "object", ragged="int64"),
        Column("words", "object", ragged="object"),
        Column("pair", "int64", (2,)),
    )
    assert len(manifest.row_groups) > 2
    found = read(store, manifest)
    for row, tokens, words in zip(found["id"], found["tokens"], found["words"], strict=True):
        assert tokens.tolist() == [row, 1, 2, 3][: row % 4]
        assert words.tolist() == ["a", "bc", "def"][: row % 4]
    assert find_difference(df.where("true or id > rand()"), df.columns, options, [manifest]) is None


@pytest.mark.parametrize(("row_order", "small", "jobs"), [("table", 0, 1), ("hash", 0, 2), ("hash", 9999, 1)])
def test_a_table_is_read_by_one_job(
    spark: SparkSession, store: Store, monkeypatch: pytest.MonkeyPatch, row_order: str, small: int, jobs: int
) -> None:
    monkeypatch.setattr("spark_elastic.estimators.dataframes.materialize.SMALL_BYTES", small)
    context, group = spark.sparkContext, uuid.uuid4().hex
    context.setJobGroup(group, "writes rows")
    read = context.accumulator(0)

    def count(value: int) -> int:
        read.add(1)
        return value

    df = spark.range(10).select(F.udf(count, "long", useArrow=False)("id").alias("x"))
    try:
        for _ in range(2):  # the second time they are found
            write(df, ["x"], store, row_order=row_order)
            assert len(context.statusTracker().getJobIdsForGroup(group)) == jobs
            assert read.value == 10
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)


def test_row_groups_are_cut_exactly_and_reused(spark: SparkSession, store: Store) -> None:
    df = spark.range(0, 1050, 1, 2).selectExpr("id", "cast(id as float) x", "'text' as unused")
    manifest = write(df, ["x", "id"], store, rows=100)
    assert manifest.group_rows == (100,) * 10 + (50,)
    in_partitions = write(df, ["x", "id"], store, rows=100, row_order="table")
    assert in_partitions.group_rows == (100, 100, 100, 100, 100, 25) * 2
    assert np.array_equal(read(store, in_partitions)["id"], np.arange(1050))
    assert [column.name for column in manifest.columns] == ["x", "id"]
    assert write(df, ["x", "id"], store, rows=100) == manifest
    assert write(df, ["x", "id"], store, rows=200).fingerprint != manifest.fingerprint
    assert write(df.where("id > 3"), ["x", "id"], store, rows=100).rows == 1046

    # The same rows written again are the same data set to a run; files that are gone or damaged are not reused.
    again = manifest
    for damage in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-500]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),  # what XFS leaves after a power cut
        lambda path: pq.write_table(pq.read_table(path)[:100], path),
        lambda path: (path.parents[2] / "manifest.json").write_bytes(b'{"version": '),
    ):
        before = again
        damage(Path(store.path(before.files[0])))
        again = write(df, ["x", "id"], store, rows=100)
        assert again.fingerprint == manifest.fingerprint
        assert again.files != before.files
        assert again.hash == manifest.hash
    moved = write(df.selectExpr("x", "1049 - id as id"), ["x", "id"], store, rows=100)
    assert moved.hash != manifest.hash
    assert np.array_equal(np.sort(read(store, again)["id"]), np.arange(1050))

    for written in (again, in_partitions) if HAS_CHECKSUMS else ():  # by Arrow and by Spark
        path = Path(store.path(written.files[0]))
        content = bytearray(path.read_bytes())
        content[pq.read_metadata(path).row_group(0).column(0).total_compressed_size // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(StoreError, match=f"row group 0 of '{written.files[0]}'.* by their checksum"):
            read(store, written)


def test_a_store_may_have_colons_in_its_path(spark: SparkSession, tmp_path: Path) -> None:
    for row_order in ("hash", "table"):
        store = Store.open(f"{tmp_path}/a::{row_order}")
        manifest = write(spark.range(3), ["id"], store, row_order=row_order)
        assert sorted(read(store, manifest)["id"]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("query", "most"),
    [
        ("select id, id % 2 = 0 as odd from range(0, 25000, 1, 1)", 10_000),
        # Compressed they are next to nothing; what counts is what a reader makes of them.
        ("select id, array_repeat(0.0d, 100000) as x from range(0, 12, 1, 1)", 6),
    ],
)
def test_row_groups_are_bounded(spark: SparkSession, store: Store, query: str, most: int) -> None:
    df = spark.sql(query)
    for row_order in ("hash", "table"):
        rows = write(df, df.columns, store, row_order=row_order).group_rows
        assert most * 0.5 < max(rows) <= most


@pytest.mark.skipif(pyspark.__version__ < "4", reason="Spark 3.5 ends row groups by their bytes alone")
def test_writing_rows_dumps_no_buffers_to_the_executors_logs(
    spark: SparkSession, spark_cluster: StandaloneCluster, store: Store
) -> None:
    logs = [log for folder in spark_cluster.scratch.parent.glob("worker*") for log in folder.rglob("stderr")]
    assert logs
    before = [log.stat().st_size for log in logs]
    df = spark.range(2000).selectExpr("cast(id as double) a", "cast(id as double) b")
    write(df, df.columns, store)
    write(df, df.columns, store, rows=10)
    written = [log.read_bytes()[size:] for log, size in zip(logs, before, strict=True)]
    assert any(written), "the executors log what they do"
    assert b"Too much memory used" not in b"".join(written)


@pytest.mark.scenario("G17")
def test_an_overwritten_table_is_not_reused(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    table = f"file://{tmp_path}/table"
    spark.range(10).write.parquet(table)
    first = write(spark.read.parquet(table), ["id"], store)
    assert write(spark.read.parquet(table), ["id"], store) == first
    spark.range(5, 15).write.mode("overwrite").parquet(table)
    second = write(spark.read.parquet(table), ["id"], store)
    assert sorted(read(store, second)["id"]) == list(range(5, 15))


@pytest.mark.parametrize(
    "condition",
    [
        "id > (select max(id) from {})",
        "id in (select id from {})",
        "exists (select 1 from {} other where other.id = mine.id)",
    ],
)
def test_rows_chosen_by_a_table_that_was_overwritten_are_not_reused(
    spark: SparkSession, tmp_path: Path, condition: str
) -> None:
    mine, other = (f"parquet.`file://{tmp_path}/{name}`" for name in ("mine", "other"))

    def take() -> str:
        df = spark.sql(f"select id from {mine} mine where {condition.format(other)}")
        return fingerprint_table(df, ["id"], WriteOptions())

    spark.range(10).write.parquet(f"file://{tmp_path}/mine")
    spark.range(3).write.parquet(f"file://{tmp_path}/other")
    before = take()
    spark.range(5).write.mode("overwrite").parquet(f"file://{tmp_path}/other")
    assert take() != before


def test_the_files_of_a_table_are_known_whatever_their_names(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(3).coalesce(1).write.parquet(f"file://{tmp_path}/one")
    (written,) = (tmp_path / "one").glob("*.parquet")
    names = ["day=a%3A1/x é%41+.parquet", "day=b/y1.parquet", "day=b/y2.parquet", "day=b c/z.parquet"]
    files = [tmp_path / "table" / name for name in names]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(written, path)
    found = materialization._list_files(spark.read.parquet(f"file://{tmp_path}/table"))
    assert found == sorted(found)
    assert {unquote(urlsplit(path).path): state for path, *state in found} == {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns // 1_000_000] for path in files
    }


def test_a_sum_that_exceeds_a_bigint_is_added_up(spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", "true")
    try:
        numbers = spark.createDataFrame([(2**62,), (2**62 + 2**20 + 5,)], "number bigint")
        found = numbers.agg(*_sum_halves(F.col("number"))).first()
    finally:
        spark.conf.set("spark.sql.ansi.enabled", before)
    assert found is not None
    assert _add_halves(found.asDict()) == 2**63 + 2**20 + 5


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("if(id in (3, 4), null, id)", "column 'x' has nulls in 2 of 20 rows"),
        ("if(id = 3, array(1.0d, null), array(1.0d, 2.0d))", "column 'x' has nulls in 1 of 20 rows"),
        ("if(id = 3, array(double('nan')), array(1.0d))", "column 'x' has NaN in 1 of 20 rows: .* 'keep'"),
        ("if(id = 7, array(1, 2), array(1, 2, 3))", "lengths, 2 and 3: the row with id=7 has 2"),
        ("array(if(id = 7, array(1), array(1, 2)))", r"lengths, 1 and 2 \(at depth 2\): the row with id=7"),
        ("cast(array() as array<int>)", "arrays of column 'x' are empty"),
        ("'a'", "column 'x' is string"),
    ],
)
def test_bad_columns_get_one_sentence(spark: SparkSession, store: Store, column: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        write(spark.sql(f"select id, {column} as x from range(20)"), ["id", "x"], store)
    assert "\n" not in str(raised.value)
    assert not list(Path(store.path("")).rglob("*.parquet")), "what was refused is cleaned away"
    with pytest.raises(InvalidInput, match="has no rows"):
        write(spark.range(0), ["id"], store)


@pytest.mark.parametrize(
    ("condition", "same"),
    [
        ("id < 7", True),
        ("id < unix_timestamp()", False),
        ("to_date('2020-01-01') <= current_date()", False),
        ("id < 10 + rand(3)", False),
        ("id < (select max(id) + 10 * rand(3) from range(9))", False),
        ("id in (select id from range(9) where now() > timestamp'2020-01-01')", False),
    ],
)
def test_a_nondeterministic_table_is_never_reused(spark: SparkSession, condition: str, same: bool) -> None:
    df = spark.range(10).where(condition)
    one, other = (fingerprint_table(df, ["id"], WriteOptions()) for _ in range(2))
    assert (one == other) == same


def test_rows_that_are_marked_with_nan_or_null_do_not_validate(spark: SparkSession, store: Store) -> None:
    marks = [0.0, 1.0, float("nan"), None, -1.0, 0.5]
    df = spark.createDataFrame([(float(n), mark) for n, mark in enumerate(marks)], "x double, mark double")
    rows, validation = materialize(df, ["x"], store, WriteOptions(split=ValidationSplit("mark")))
    assert validation is not None
    assert (rows.rows, validation.rows) == (4, 2)


def test_a_feature_named_as_the_validation_column_is_refused(spark: SparkSession, store: Store) -> None:
    df = spark.range(10).withColumnRenamed("id", "__Validation")
    with pytest.raises(InvalidInput, match="'__validation' has the name of the folders that validation"):
        materialize(df, ["__Validation"], store, WriteOptions(split=ValidationSplit(0.5)))


def test_a_null_vector_is_named(spark: SparkSession, store: Store) -> None:
    df = spark.createDataFrame([(Vectors.dense([1.0]),), (None,)], StructType().add("v", VectorUDT()))
    with pytest.raises(InvalidInput, match="column 'v' has nulls in 1 of 2 rows"):
        write(df, ["v"], store)


@pytest.mark.native
@pytest.mark.faults
@pytest.mark.parametrize("reader", READERS[1:])
def test_p1_p2_hold_with_every_reader_after_a_lost_executor(
    reader: str, spark: SparkSession, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    fit_through_a_loss(spark, standalone, fault, tmp_path, workers=3, reader=reader)
