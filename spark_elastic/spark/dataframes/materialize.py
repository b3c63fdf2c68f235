"""A DataFrame's columns as Parquet in the store, with a manifest.

Owns the order of writing: Spark writes to a folder that nobody knows, the driver reads the footers once, and the
manifest, renamed into place, publishes it. Nulls and lengths are counted by the same job that writes; a second one
runs only to name the row of an error. Runs in the caller's thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_elastic.data.manifest import Column, Manifest, RowGroup
from spark_elastic.data.reading.decoding import read_footers
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.spark.dataframes.scan import (
    MissingValues,
    RowFilter,
    TableScan,
    column_named,
    row_digest_of,
    select_prepared,
)
from spark_elastic.spark.dataframes.schema import (
    ColumnType,
    check_validation_column,
    column_type,
    fixed_row_bytes,
)
from spark_elastic.spark.dataframes.store_access import check_store_access, spark_url
from spark_elastic.spark.session import describe_jobs

# What a materialised data set was made from, so that the same DataFrame is not written twice.
#
# Owns the identity of a DataFrame: its logical plan, its columns, how it is written, and the state of the files that
# it reads (a table that was overwritten is another DataFrame, though its plan is the same). Where that state cannot
# be seen (other databases, Spark Connect, clusters that deny it), a fingerprint is unique and nothing is reused. Any
# thread.


_FORM = 1  # of what is written; raise it when that changes
# Leaves of a plan whose rows cannot change, and the relation whose files can be looked at.
_RDDS = {"LogicalRDD", "ExternalRDD"}
_FIXED_LEAVES = {"LocalRelation", "Range", "OneRowRelation"} | _RDDS
_FILES = "HadoopFsRelation"


def fingerprint(df: DataFrame, columns: Sequence[str], options: Mapping[str, str]) -> str:
    """32 hex digits: equal only for the same columns of the same rows, written the same way."""
    content = {
        "form": _FORM,
        "plan": df.semanticHash(),
        "source": _source(df),
        "columns": [[name, df.schema[name].dataType.json()] for name in columns],
        "options": dict(options),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _source(df: DataFrame) -> list[Any]:
    """The plan's text, which has more bits than Spark's hash of it, and the files that it reads."""
    frame: Any = getattr(df, "_jdf", None)
    if frame is None:
        return [uuid.uuid4().hex]
    from py4j.protocol import Py4JError  # which a client of Spark Connect alone has not

    try:
        plan = frame.queryExecution().analyzed()
        kinds = set(_leaves(plan))
        if not kinds <= _FIXED_LEAVES | {_FILES}:
            return [uuid.uuid4().hex]
        text = str(plan.canonicalized().toString())
        # Spark tells RDDs apart by an address, which another driver may come to for other rows.
        owner = df.sparkSession.sparkContext.applicationId if kinds & _RDDS else ""
        return [text, _files(df) if _FILES in kinds else [], *filter(None, [owner])]
    except Py4JError:
        return [uuid.uuid4().hex]


def _leaves(plan: Any) -> Iterator[str]:
    leaves = plan.collectLeaves()
    for index in range(leaves.size()):
        leaf = leaves.apply(index)
        kind = str(leaf.getClass().getSimpleName())
        yield str(leaf.relation().getClass().getSimpleName()) if kind == "LogicalRelation" else kind


def _files(df: DataFrame) -> list[list[Any]]:
    """(path, bytes, time of change) of each file that the DataFrame reads."""
    gateway: Any = df.sparkSession._jvm
    configuration = df.sparkSession._jsparkSession.sessionState().newHadoopConf()
    states: list[list[Any]] = []
    for path in sorted(df.inputFiles()):
        place = gateway.org.apache.hadoop.fs.Path(gateway.java.net.URI(path))
        status = place.getFileSystem(configuration).getFileStatus(place)
        states.append([path, status.getLen(), status.getModificationTime()])
    return states


# For workers of any memory: what they keep decoded is bounded, and the plan takes so many lanes as fit into that.
ROW_GROUP_BYTES = 4 << 20
ROWS_PER_GROUP = 10_000
_UNBOUNDED_ROWS = 1 << 30
_FOLDER = "data"
_SPLIT = "__validation"  # the folders of a split: __validation=true, __validation=false
_GRAIN = 1 << 20  # of a fraction
_MANY_PARTITIONS, _FEW_ROWS = 300, 1000

log = logging.getLogger("spark_elastic")


@dataclass(frozen=True)
class WriteOptions:
    """How columns are written.

    Each row group but the last of a file has exactly `rows_per_group` rows; without it, about `row_group_bytes` before
    compression, and 10,000 rows at most (on Spark 3.5 only where every column holds single numbers). transformed:
    columns that only a transformation makes numbers of are written as they are. missing: what happens to rows with
    nulls and NaN.
    """

    rows_per_group: int | None = None
    row_group_bytes: int = ROW_GROUP_BYTES
    transformed: bool = False
    missing: MissingValues = field(default_factory=MissingValues)

    def __post_init__(self) -> None:
        for setting in ("rows_per_group", "row_group_bytes"):
            value = getattr(self, setting)
            if value is not None and value < 1:
                raise InvalidInput(f"{setting} is {value}: it must be at least 1.")

    def options(self, row_bytes: int | None = None) -> dict[str, str]:
        """Options of Spark's Parquet writer. row_bytes: bytes of each row; None if rows may differ."""
        rows = self.rows_per_group
        if rows is None and row_bytes is not None:
            rows = min(ROWS_PER_GROUP, max(1, self.row_group_bytes // row_bytes))
        return {
            "parquet.block.row.count.limit": str(rows or ROWS_PER_GROUP),
            # Spark 3.5 knows no limit of rows: looked at after `rows` rows, each group is above a limit of one byte.
            "parquet.block.size": str(1 if rows else self.row_group_bytes),
            # Rows of 100,000 numbers: a first look at the size after 100 rows would come at 40 MB.
            "parquet.page.size.row.check.min": str(rows or 1),
            "parquet.page.size.row.check.max": str(rows or ROWS_PER_GROUP),
            # A page that ends within its group is compressed, and no longer counts with what it was.
            "parquet.page.size": str(2 * self.row_group_bytes),
            "parquet.page.row.count.limit": str(_UNBOUNDED_ROWS),
            # Numbers that hardly repeat: a dictionary costs time at both ends and saves nothing.
            "parquet.enable.dictionary": "false",
            # The user's session may say otherwise.
            "compression": "snappy",
            "maxRecordsPerFile": "0",
        }


@dataclass(frozen=True)
class ValidationSplit:
    """Which rows validate: those where `column` is true or above 0, or a `fraction` chosen by a hash of row and seed.

    The hash knows a row's values alone, so that neither partitions nor a second run move a row to the other side.
    """

    fraction: float = 0.0
    column: str | None = None
    seed: int = 0

    def condition(self, df: DataFrame, names: Sequence[str]) -> SparkColumn:
        """Whether a row validates; `names` are the columns that are hashed."""
        if self.column is not None:
            check_validation_column(df.schema, self.column)
            return F.coalesce(column_named(self.column).cast("double") > 0, F.lit(False))
        if not 0 < self.fraction < 1:
            raise InvalidInput(f"The validation fraction is {self.fraction}: it must be between 0 and 1.")
        place = F.pmod(F.xxhash64(F.lit(self.seed), *(column_named(name) for name in names)), F.lit(_GRAIN))
        return place < round(self.fraction * _GRAIN)


def materialize(
    df: DataFrame, columns: Sequence[str], store: Store, writing: WriteOptions | None = None
) -> Manifest:
    """Write `columns` of `df` to the store, or find them there, written before from the same DataFrame.

    Vectors become float32 arrays, decimals float64. InvalidInput for columns that hold no numbers, for nulls, arrays of
    different lengths and a DataFrame without rows; StoreError where the store cannot be written.
    """
    return _materialized(df, columns, store, writing or WriteOptions(), None)[0]


def materialize_split(
    df: DataFrame,
    columns: Sequence[str],
    store: Store,
    split: ValidationSplit,
    writing: WriteOptions | None = None,
) -> tuple[Manifest, Manifest]:
    """The same in two data sets, rows to train on and rows to validate with, written by one job."""
    train, validation = _materialized(df, columns, store, writing or WriteOptions(), split)
    return train, validation


def _materialized(
    df: DataFrame, columns: Sequence[str], store: Store, writing: WriteOptions, split: ValidationSplit | None
) -> tuple[Manifest, ...]:
    names = list(dict.fromkeys(columns))
    if not names:
        raise InvalidInput(f"No columns to write: name some of {df.columns}.")
    types = find_column_types(df, names, writing)
    made_from = fingerprint_table(df, names, writing, split)
    documents = ["manifest.json"] if split is None else ["manifest.json", "validation.json"]
    published = [f"{_FOLDER}/{made_from}/{name}" for name in documents]
    # The first is written last, so that it stands for all.
    found = [_reusable(store, name) for name in published]
    reusable = tuple(manifest for manifest in found if manifest is not None)
    if len(reusable) == len(published):
        return reusable
    check_store_access(df.sparkSession, store)
    options = writing.options(fixed_row_bytes(types.values()))
    folder = f"{_FOLDER}/{made_from}/{uuid.uuid4().hex}"
    try:
        with describe_jobs(df.sparkSession, "writes rows"):
            manifests = _written(
                df, types, _Target(store, folder, made_from, writing.missing, options), split
            )
        for name, manifest in reversed(list(zip(published, manifests, strict=True))):
            manifest.save(store, name)
    except BaseException:
        store.remove_tree(folder)
        raise
    return manifests


def find_column_types(df: DataFrame, names: Sequence[str], writing: WriteOptions) -> dict[str, ColumnType]:
    """The type that each column becomes."""
    return {name: column_type(df.schema, name, transformed=writing.transformed) for name in names}


def fingerprint_table(
    df: DataFrame, names: Sequence[str], writing: WriteOptions, split: ValidationSplit | None
) -> str:
    """The fingerprint of what is written."""
    return fingerprint(df, names, {**writing.options(), "writing": repr(writing), "split": repr(split)})


@dataclass(frozen=True)
class _Target:
    """Where and how it is written."""

    store: Store
    folder: str
    made_from: str
    missing: MissingValues
    options: Mapping[str, str]


def _written(
    df: DataFrame, types: Mapping[str, ColumnType], target: _Target, split: ValidationSplit | None
) -> tuple[Manifest, ...]:
    """Write the columns into a folder and describe what is there; nothing of it is known to anyone yet."""
    missing, url = target.missing, spark_url(target.store, target.folder)
    scan, dropping = TableScan(types, nans=missing.nans == "refuse"), RowFilter(types, missing)
    rows = scan.observe(dropping.apply(select_columns(df, types, split)))
    writer = rows.write.options(**target.options).mode("error")
    (writer if split is None else writer.partitionBy(_SPLIT)).parquet(url)
    dropping.log_dropped_rows()
    folders = [""] if split is None else [f"/{_SPLIT}=false", f"/{_SPLIT}=true"]
    found = [_footers(target.store, target.folder + each) for each in folders]
    if not any(groups for _, groups in found):
        raise InvalidInput("The DataFrame has no rows: there is nothing to train on.")
    shapes = scan.check_shapes(lambda: df.sparkSession.read.parquet(url))
    columns = tuple(Column(name, kind.dtype, shapes[name]) for name, kind in types.items())
    if not all(groups for _, groups in found):
        total = sum(group.rows for _, groups in found for group in groups)
        side_name = "validate with" if found[0][1] else "train on"
        raise InvalidInput(
            f"No row of {total} is left to {side_name}: change the validation fraction or column."
        )
    # A partition makes a file of each side that has rows of it.
    warn_about_small_partitions(
        sum(group.rows for _, groups in found for group in groups), max(len(files) for files, _ in found)
    )
    return tuple(
        Manifest(columns, files, groups, target.made_from, scan.digest() + each)
        for each, (files, groups) in zip(folders, found, strict=True)
    )


def warn_about_small_partitions(rows: int, partitions: int) -> None:
    """Say what a table in many small partitions costs: a task and a file each, whatever is in it."""
    if partitions > _MANY_PARTITIONS and rows < _FEW_ROWS * partitions:
        log.warning(
            "the table has %d partitions, of %d rows on average, and Spark took 30 ms or more for each: with "
            "df.coalesce(100), for example, the training would begin sooner",
            partitions,
            rows // partitions,
        )


def select_columns(
    df: DataFrame, types: Mapping[str, ColumnType], split: ValidationSplit | None
) -> DataFrame:
    """The columns as they are written, and whether a row validates where some do."""
    return select_prepared(df, types, {} if split is None else {_SPLIT: split.condition(df, list(types))})


def _footers(store: Store, folder: str) -> tuple[tuple[str, ...], tuple[RowGroup, ...]]:
    return read_footers(store, [name for name in store.list(folder) if name.endswith(".parquet")])


def _reusable(store: Store, published: str) -> Manifest | None:
    """The manifest of that name, if all of its files are still there."""
    if not store.exists(published):
        return None
    try:
        manifest = Manifest.load(store, published)
    except StoreError:
        # Of another version, or damaged: it is written anew, under the same name.
        return None
    folders = {name.rpartition("/")[0] for name in manifest.files}
    there = {name for folder in folders for name in store.list(folder)}
    return manifest if there.issuperset(manifest.files) else None


@dataclass(frozen=True)
class How:
    """How the rows were written: as for `materialize`."""

    writing: WriteOptions
    split: ValidationSplit | None


def find_difference(
    df: DataFrame, columns: Sequence[str], how: How, written: Sequence[Manifest]
) -> str | None:
    """What tells `df` from what was written, as the end of a sentence; None where nothing does.

    columns: as for writing. written: what came of it, one data set or the two sides of a split.
    """
    names = list(dict.fromkeys(columns))
    types = find_column_types(df, names, how.writing)
    for name, kind in types.items():
        before = written[0].column(name).dtype
        if kind.dtype != before:
            return f"column {name!r} was {before} and is {kind.dtype}"
    if fingerprint_table(df, names, how.writing, how.split) == written[0].fingerprint:
        return None
    rows = sum(manifest.rows for manifest in written)
    return compare_digests(rows, written[0].content, _rows(df, types, how))


def compare_digests(rows: int, content: str, now: str) -> str | None:
    """rows, content: of what was written; an older release's says nothing of values. now: as `Scan.rows`."""
    number = int(now.partition("-")[0])
    if number != rows:
        return f"it had {rows} rows and has {number}"
    return "its rows have other values" if row_digest_of(content) not in (now, None) else None


def _rows(df: DataFrame, types: Mapping[str, ColumnType], how: How) -> str:
    scan = TableScan(types)
    kept = RowFilter(types, how.writing.missing).apply(select_columns(df, types, how.split))
    scan.observe(kept).write.format("noop").mode("overwrite").save()
    return scan.digest_rows()
