"""Writes columns of a DataFrame to the store as Parquet with a manifest, or finds them there.

Spark writes to a folder of a random name; the driver reads the footers once and publishes the data set by writing its
manifest. The job that writes also counts nulls and array lengths; a job of its own runs only to name the row of an
error. Rows in the order of their hash are written by tasks of our own (`data/sorted_rows.py`).

`fingerprint` identifies what was written from what: the logical plan, the columns, how they are written, and the state
of the files that the plan reads. Where that state cannot be seen, or the plan has random or time-dependent expressions,
a fingerprint is unique and nothing is reused. `find_difference` then counts and hashes the rows by a job of its own
(R19, resuming a run). Runs in the caller's thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from spark_elastic.clusters.spark.host_facts import describe_jobs, has_context
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reading.decoding import read_footers
from spark_elastic.data.sorted_rows import (
    CHUNK_BYTES,
    DISTINCT,
    READS,
    ROW,
    CopyTask,
    MergeTask,
    ReadTask,
    SortTask,
    estimate_distinct,
)
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.dataframes.scan import (
    EXACT_COLUMN,
    HASH_COLUMN,
    MissingValues,
    RowFilter,
    TableScan,
    extract_row_digest,
    get_column,
    hash_columns,
    hash_row,
    quote,
    select_prepared,
)
from spark_elastic.estimators.dataframes.schema import (
    ColumnType,
    check_validation_column,
    compute_row_bytes,
    find_column_type,
    get_type,
)
from spark_elastic.estimators.dataframes.store_access import (
    check_store_access,
    escape_pattern,
    to_spark_url,
    translate_write_errors,
)
from spark_elastic.monitoring.logs import announce_phase

GROUPS_PER_FILE = 16
SMALL_BYTES = 8 << 20  # of a table that the driver merges, at most
_COPIED_ROWS = 2_000_000  # of which the driver makes copies at most: it takes 50 bytes for each
_COPY_BYTES = 4 << 20  # of copies that a task makes at least
_MERGED_BYTES = 16 << 20  # that a task merges at least, if others are as many as sorted; a task costs 50 ms
_MOST_SHARES = 32  # of the copies of a row
_HASHES = (HASH_COLUMN, EXACT_COLUMN)
_BATCH_LIMITS = ("spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch")
# With the value of RDDs' Python workers, tasks run in those, which later serve slots: others would import all anew.
_TRACEBACK = ("spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled", "false")
_BATCH_ROWS, _BATCH_BYTES = 10_000, 4 << 20
_UNKNOWN_BATCH = 128  # rows of a batch, if their size is not known and Spark does not look at it
_UNBOUNDED = (1 << 31) - 1  # bytes; else Spark adds up the columns' sizes after each row


def add_hashes(rows: DataFrame, types: Mapping[str, ColumnType]) -> DataFrame:
    """The rows with the two columns that decide on their order. Sums of float64 after a shuffle differ in their last
    bits from run to run: float32 decides, float64 only among rows that are equal in it."""
    exact = hash_columns("1", *map(quote, types))
    return rows.withColumns({HASH_COLUMN: hash_row(types), EXACT_COLUMN: exact})


@dataclass(frozen=True)
class SortedChunks:
    """The rows of a table, which have the columns of `add_hashes`, in chunks in the store."""

    spark: SparkSession
    sort: SortTask  # by which they were written
    types: Mapping[str, ColumnType]
    schema: StructType
    names: Mapping[bool, list[str]]  # whether rows validate -> chunks
    most: int = 1  # copies of a row; there may be fewer
    distinct: int = 0  # about how many rows differ

    @classmethod
    def write(
        cls, rows: DataFrame, types: Mapping[str, ColumnType], store: Store, folder: str, split: str | None
    ) -> SortedChunks:
        """Compute the rows, once. types: of the columns that are trained on."""
        task, spark = SortTask(store, folder, _HASHES, split), rows.sparkSession
        limits = _choose_batch_limits(spark, compute_row_bytes(types.values()))
        with _set_conf(spark, limits), translate_write_errors(store):
            found = rows.select(F.struct("*").alias(ROW)).mapInArrow(task, task.SCHEMA).collect()
        distinct = estimate_distinct(chunk.smallest for chunk in found)
        return cls(spark, task, types, rows.schema, {}, distinct=distinct)._with(found)

    @property
    def files(self) -> list[str]:
        return [name for names in self.names.values() for name in names]

    def read(self) -> DataFrame:
        task = ReadTask(self.sort.store, self.files)
        row = StructType([StructField(ROW, self.schema)])
        numbers = self.spark.range(0, len(self.files), 1, len(self.files))
        return numbers.mapInArrow(task, row).select(f"{ROW}.*")

    def merge(
        self,
        folder: str,
        columns: Sequence[Column],
        counts: Mapping[bool, int],
        rows_per_group: int,
        row_bytes: int,
    ) -> list[list[str]]:
        """Write the rows in order, `row_bytes` each on average; the files of each data set. counts: rows of each."""
        total, distinct = sum(counts.values()), self.distinct
        has_copies = distinct < DISTINCT * total
        # Copies of few rows are few bytes to read: the driver makes more of them, if they need not travel either.
        makes_copies = has_copies and total <= _COPIED_ROWS and self.sort.store.is_local
        # A client of Spark Connect may be far from the store.
        most = CHUNK_BYTES if makes_copies else SMALL_BYTES
        small = total * row_bytes <= most and has_context(self.spark)
        tasks = max(len(self.files), total * row_bytes // _MERGED_BYTES)
        chunks = self._spread_copies(len(counts), distinct, total, row_bytes, small) if has_copies else self
        rows_per_file = rows_per_group * GROUPS_PER_FILE
        files = {validates: -(-count // rows_per_file) for validates, count in counts.items()}
        task = MergeTask(self.sort, folder, chunks.names, files, columns, rows_per_group)
        written = self._run(task, sum(files.values()), tasks, small)
        found = {row["number"]: row["name"] for row in written}
        ends = accumulate(files.values(), initial=0)
        return [[found[each] for each in range(*bounds) if found[each]] for bounds in pairwise(ends)]

    def _spread_copies(
        self, sets: int, distinct: int, total: int, row_bytes: int, here: bool
    ) -> SortedChunks:
        """The same rows in the order of a hash of row and copy. A task makes its share of the copies of a range's rows:
        there are many shares if few rows are distinct, or one has very many copies."""
        ranges = max(1, distinct * row_bytes // CHUNK_BYTES)
        tasks = max(1, min(len(self.files), total * row_bytes // _COPY_BYTES))
        heavy = min(_MOST_SHARES, self.most * row_bytes // CHUNK_BYTES)
        task = CopyTask(self.sort, self.names, list(self.types), ranges, max(-(-tasks // ranges), heavy))
        number = sets * ranges * task.shares
        return self._with(self._run(task, number, number, here))

    def _run(self, task: CopyTask | MergeTask, number: int, tasks: int, here: bool) -> list[Any]:
        """What a task gives for so many numbers: in threads of the driver, or divided among tasks of Spark."""
        if here:
            with ThreadPoolExecutor(READS) as pool:
                parts = list(
                    pool.map(lambda n: list(task([pa.RecordBatch.from_pydict({"id": [n]})])), range(number))
                )
            return [row for part in parts for batch in part for row in batch.to_pylist()]
        with _set_conf(self.spark, {}), translate_write_errors(self.sort.store):
            return self.spark.range(0, number, 1, min(number, tasks)).mapInArrow(task, task.SCHEMA).collect()

    def _with(self, chunks: Sequence[Any]) -> SortedChunks:
        """The same of other chunks, as `SortTask` describes them."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for chunk in chunks:
            names[chunk["validates"]].append(chunk["name"])
        return replace(self, names=names, most=sum(chunk["most"] for chunk in chunks))


def _choose_batch_limits(spark: SparkSession, row_bytes: int | None) -> dict[str, str]:
    limits = _BATCH_ROWS, _BATCH_BYTES
    if row_bytes is not None:
        limits = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes)), _UNBOUNDED
    elif not spark.conf.isModifiable(_BATCH_LIMITS[1]):  # it is of Spark 4.1
        limits = _UNKNOWN_BATCH, _UNBOUNDED
    return dict(zip(_BATCH_LIMITS, map(str, limits), strict=True))


@contextmanager
def _set_conf(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set these for the jobs of the block, and `_TRACEBACK` where slots are tasks of RDDs."""
    if has_context(spark):
        settings = {**settings, _TRACEBACK[0]: _TRACEBACK[1]}
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, former in before.items():
            spark.conf.unset(name) if former is None else spark.conf.set(name, former)


_FORM = 6  # of what is written; raise it when that changes
# Leaves of a logical plan whose rows cannot change, and the relation whose files can be listed.
_RDDS = {"LogicalRDD", "ExternalRDD"}
_FIXED_LEAVES = {"LocalRelation", "Range", "OneRowRelation"} | _RDDS
_FILES = "HadoopFsRelation"

# For workers of any memory: what they keep decoded is bounded, and the plan takes as many lanes as fit into that.
ROW_GROUP_BYTES = 4 << 20
_UNBOUNDED_ROWS = 1 << 30
_FOLDER = "data"
_SPLIT = "__validation"  # the folders of a split: __validation=true, __validation=false
_HASH_RANGE = 1 << 20  # the resolution of a fraction
_MANY_PARTITIONS, _FEW_ROWS = 300, 1000

log = logging.getLogger("spark_elastic")


@dataclass(frozen=True)
class WriteOptions:
    """How columns are written."""

    # Of a row group, at most (on Spark 3.5, in the table's order, only if every column holds single numbers).
    rows_per_group: int = 10_000
    row_group_bytes: int = ROW_GROUP_BYTES  # bytes of a row group before compression
    transformed: bool = False  # whether strings, bytes, dates and ragged arrays are written as they are
    missing: MissingValues = field(default_factory=MissingValues)  # what happens to rows with nulls and NaN
    row_order: str = "hash"  # hash: by a hash of each row, the same on any cluster; table: as Spark has them
    split: ValidationSplit | None = None  # which rows validate; None: none

    @property
    def split_column(self) -> str | None:
        """The column that says which rows validate, if some do."""
        return None if self.split is None else _SPLIT

    def find_types(self, df: DataFrame, names: Sequence[str]) -> dict[str, ColumnType]:
        return {name: find_column_type(df.schema, name, transformed=self.transformed) for name in names}

    def select(self, df: DataFrame, types: Mapping[str, ColumnType]) -> DataFrame:
        """The columns as they are written and, with a split, whether a row validates."""
        return select_prepared(df, types) if self.split is None else self.split.select(df, types)

    def count_group_rows(self, row_bytes: int) -> int:
        """Rows of a row group, of rows of so many bytes on average."""
        return min(self.rows_per_group, max(1, self.row_group_bytes // row_bytes))

    def to_spark_options(self, row_bytes: int | None = None, counts_rows: bool = True) -> dict[str, str]:
        """Of Spark's Parquet writer. row_bytes: None if rows differ. counts_rows: whether it can, as Spark 4's does."""
        rows, least, size = self.rows_per_group, 1, self.row_group_bytes
        if row_bytes is not None:
            rows = least = self.count_group_rows(row_bytes)
            # A writer that holds more than three times the size dumps its buffers to the log. One that does not count
            # looks at the size after `rows` rows.
            size = max(size, 2 * rows * row_bytes) if counts_rows else 1
        return {
            "parquet.block.row.count.limit": str(rows),
            "parquet.block.size": str(size),
            # By default the size is first checked after 100 rows: 40 MB if a row has 100,000 numbers.
            "parquet.page.size.row.check.min": str(least),
            "parquet.page.size.row.check.max": str(rows),
            # A page that ends within its group is compressed and then counts with its compressed size.
            "parquet.page.size": str(2 * self.row_group_bytes),
            "parquet.page.row.count.limit": str(_UNBOUNDED_ROWS),
            # Numbers hardly repeat: a dictionary would cost time at both ends and save nothing.
            "parquet.enable.dictionary": "false",
            # The user's session may have other defaults.
            "parquet.page.write-checksum.enabled": "true",
            "compression": "snappy",
            "maxRecordsPerFile": "0",
        }


@dataclass(frozen=True)
class ValidationSplit:
    """Which rows validate: marked ones, or a fraction of all, chosen by a hash of each row's values as they are written
    (float64 as float32) and the seed, so that neither other partitions nor a second run move a row."""

    by: float | str  # a fraction of the rows, or the column that is true or above 0 in them
    seed: int = 0  # of the fit; it changes which rows the fraction takes

    def select(self, df: DataFrame, types: Mapping[str, ColumnType]) -> DataFrame:
        """The columns as they are written, and whether a row validates."""
        if isinstance(self.by, str):
            check_validation_column(df.schema, self.by)
            number = get_column(self.by).cast("double")
            # In Spark NaN is above all numbers.
            marked = F.coalesce((number > 0) & ~F.isnan(number), F.lit(False))
            return select_prepared(df, types, {_SPLIT: marked})
        drawn = F.pmod(hash_row(types, str(self.seed)), F.lit(_HASH_RANGE))
        return select_prepared(df, types).withColumn(_SPLIT, drawn < round(self.by * _HASH_RANGE))


def materialize(
    df: DataFrame, columns: Sequence[str], store: Store, options: WriteOptions | None = None
) -> tuple[Manifest, Manifest | None]:
    """Write `columns` of `df` to the store, or find what was written there before from the same DataFrame.

    Returns the data set to train on and, with a split, the one to validate with; one job writes both. Vectors become
    float32 arrays, decimals float64. Raises InvalidInput for missing values, arrays of different lengths, and no rows.
    """
    names, options = list(dict.fromkeys(columns)), options or WriteOptions()
    if options.split is not None and _SPLIT in map(str.lower, names):
        raise InvalidInput(
            f"The column {_SPLIT!r} has the name of the folders that validation splits the rows into: rename it "
            "(df.withColumnRenamed)."
        )
    types = options.find_types(df, names)
    found = fingerprint_table(df, names, options)
    documents = ["manifest.json", "validation.json"][: 1 if options.split is None else 2]
    published = [f"{_FOLDER}/{found}/{name}" for name in documents]
    manifests = [_load_reusable(store, name) for name in published]
    if manifests[0] is None or manifests[-1] is None:
        check_store_access(df.sparkSession, store)
        target = _Target(store, f"{_FOLDER}/{found}/{uuid.uuid4().hex}", found, options)
        manifests = list(_write_and_publish(df, types, target, published))
    assert manifests[0] is not None
    return manifests[0], None if options.split is None else manifests[1]


@dataclass(frozen=True)
class _Target:
    """Where and how a data set is written."""

    store: Store  # executors and driver both reach it
    folder: str  # in the store; nothing else is written there
    fingerprint: str  # what the rows come from and how they are written: `fingerprint_table`
    options: WriteOptions  # how files are laid out

    def write(self, rows: DataFrame, row_bytes: int | None, folders: str | None = None) -> None:
        """Write the rows into the folder, or into one for each value of the column `folders`."""
        counts_rows = int(rows.sparkSession.version.partition(".")[0]) >= 4
        writer = rows.write.options(**self.options.to_spark_options(row_bytes, counts_rows)).mode("error")
        with translate_write_errors(self.store):
            (writer if folders is None else writer.partitionBy(folders)).parquet(self._url)

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:
        return spark.read.schema(schema).parquet(escape_pattern(self._url))

    def list_files(self, folder: str = "") -> list[str]:
        return [name for name in self.store.list(self.folder + folder) if name.endswith(".parquet")]

    @property
    def _url(self) -> str:
        return to_spark_url(self.store, self.folder)


def _write_and_publish(
    df: DataFrame, types: Mapping[str, ColumnType], target: _Target, published: Sequence[str]
) -> tuple[Manifest, ...]:
    announce_phase(f"writing the rows to {target.store.url}")
    try:
        with describe_jobs(df.sparkSession, "writes rows"):
            manifests = _write(df, types, target)
        announce_phase(f"wrote {sum(each.rows for each in manifests):,} rows")
        # The first manifest is written last: where it exists, all do.
        for name, manifest in reversed(list(zip(published, manifests, strict=True))):
            manifest.save(target.store, name)
    except BaseException:
        target.store.discard(target.folder)
        raise
    return manifests


def _write(df: DataFrame, types: Mapping[str, ColumnType], target: _Target) -> tuple[Manifest, ...]:
    """Write the columns into the target's folder and describe what is there; nothing is published yet."""
    options, column = target.options, target.options.split_column
    sorts, nans = options.row_order == "hash", options.missing.nans == "refuse"
    scan = TableScan(types, nans, column, not sorts, options.transformed)
    row_filter = RowFilter(types, options.missing)
    rows = row_filter.apply(options.select(df, types))
    rows = scan.observe(add_hashes(rows, types) if sorts else rows)
    folders = [""] if column is None else [f"/{column}=false", f"/{column}=true"]
    chunks = None
    if sorts:
        chunks = SortedChunks.write(rows, types, target.store, f"{target.folder}/unordered", column)
    else:
        target.write(rows, compute_row_bytes(types.values()), column)
    row_filter.log_dropped_rows()
    counts = _check_counts(scan)
    read = chunks.read if chunks else lambda: target.read(df.sparkSession, rows.schema)
    columns = scan.describe_columns(read)
    files = list(chunks.names.values()) if chunks else [target.list_files(folder) for folder in folders]
    # Each partition makes a file in each folder for which it has rows.
    warn_about_small_partitions(sum(counts.values()), max(map(len, files)))
    if chunks is not None:
        row_bytes = sum(column.row_bytes for column in columns)
        row_bytes += scan.count_bytes(columns) // sum(counts.values())
        number = options.count_group_rows(row_bytes)
        files = chunks.merge(f"{target.folder}/ordered", columns, counts, number, row_bytes)
        target.store.discard(chunks.sort.folder)
    manifests = []
    for folder, names in zip(folders, files, strict=True):
        footers = read_footers(target.store, names)
        manifests.append(Manifest(columns, *footers, target.fingerprint, scan.digest() + folder))
    found, counted = [manifest.rows for manifest in manifests], list(counts.values())
    if found != counted:
        raise StoreError(
            f"The files that Spark wrote to {target.folder} in the store {target.store.url} have {found} rows, and "
            f"Spark counted {counted}: check what commits its files (spark.sql.sources.commitProtocolClass), and that "
            "Spark's settings and storage_options lead to the same place."
        )
    return tuple(manifests)


def _check_counts(scan: TableScan) -> dict[bool, int]:
    """The rows to train on (False) and, with a split, to validate with (True). Raises InvalidInput for none."""
    counts = scan.count_rows()
    total = sum(counts.values())
    if not total:
        raise InvalidInput("The DataFrame has no rows: there is nothing to train on.")
    if not all(counts.values()):
        purpose = "validate with" if counts[False] else "train on"
        raise InvalidInput(f"No row of {total} is left to {purpose}: change validation's fraction or column.")
    return counts


def _load_reusable(store: Store, published: str) -> Manifest | None:
    """The manifest of that name, if all of its files still have the row groups that it says."""
    if not store.exists(published):
        return None
    try:
        manifest = Manifest.load(store, published)
        # Names alone would do after a power cut that has taken content: files are then empty, short, or zeros.
        intact = read_footers(store, manifest.files) == (manifest.files, manifest.row_groups)
    except StoreError:
        return None  # of another version, or damaged: it is written again under the same name
    return manifest if intact else None


def warn_about_small_partitions(rows: int, partitions: int) -> None:
    """Each partition costs a task and a file, however few rows it has."""
    if partitions > _MANY_PARTITIONS and rows < _FEW_ROWS * partitions:
        counts = partitions, rows // partitions
        advice = "with df.coalesce(100), for example, the training would begin sooner"
        told = "the table has %d partitions, of %d rows on average, and Spark took 30 ms or more for each: %s"
        log.warning(told, *counts, advice)


def fingerprint_table(df: DataFrame, names: Sequence[str], options: WriteOptions) -> str:
    """32 hex digits: equal only for the same columns of the same rows, written the same way."""
    content = {
        "form": _FORM,
        "plan": df.semanticHash(),
        "source": _describe_source(df),
        "columns": [[name, get_type(df.schema, name).json()] for name in names],
        "options": {**options.to_spark_options(), "writing": repr(options)},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _describe_source(df: DataFrame) -> list[Any]:
    """The plan's text, which has more bits than Spark's hash of it, and the files that it reads."""
    frame: Any = vars(df).get("_jdf")
    if frame is None:
        return [uuid.uuid4().hex]
    from py4j.protocol import Py4JError  # clients of Spark Connect have no py4j

    try:
        plan = frame.queryExecution().analyzed()
        kinds = set(_iter_leaves(plan))
        if not kinds <= _FIXED_LEAVES | {_FILES} or _has_unseen_content(df, plan):
            return [uuid.uuid4().hex]
        text = str(plan.canonicalized().toString())
        # Spark tells RDDs apart by an address, which may belong to other rows in another driver.
        owner = df.sparkSession.sparkContext.applicationId if kinds & _RDDS else ""
        return [text, _list_files(df) if _FILES in kinds else [], *filter(None, [owner])]
    except (Py4JError, KeyError):  # access is denied, or a file is gone
        return [uuid.uuid4().hex]


def _has_unseen_content(df: DataFrame, plan: Any) -> bool:
    """Whether rows depend on more than the leaves: expressions that are random, or depend on time, user or session,
    or subqueries, whose tables are no leaves of the plan."""
    gateway: Any = df.sparkSession._jvm
    patterns = gateway.org.apache.spark.sql.catalyst.trees.TreePattern
    unseen = patterns.CURRENT_LIKE(), patterns.PLAN_EXPRESSION()
    return not plan.deterministic() or any(plan.containsPattern(each) for each in unseen)


def _iter_leaves(plan: Any) -> Iterator[str]:
    leaves = plan.collectLeaves()
    for index in range(leaves.size()):
        leaf = leaves.apply(index)
        kind = str(leaf.getClass().getSimpleName())
        yield str(leaf.relation().getClass().getSimpleName()) if kind == "LogicalRelation" else kind


def _list_files(df: DataFrame) -> list[list[Any]]:
    """(path, bytes, modification time) of each file that the DataFrame reads."""
    gateway: Any = df.sparkSession._jvm
    # Once: each dot costs a round trip.
    make_path, make_uri = gateway.org.apache.hadoop.fs.Path, gateway.java.net.URI
    configuration = df.sparkSession._jsparkSession.sessionState().newHadoopConf()
    folders: dict[str, list[str]] = {}
    for path in df.inputFiles():
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    states: list[list[Any]] = []
    for folder, paths in folders.items():
        # One request lists a folder; what it lists for a file is the file.
        place = make_path(make_uri(f"{folder}/" if len(paths) > 1 else paths[0]))
        wanted = {unquote(path.rpartition("/")[2]): path for path in paths}
        for status in place.getFileSystem(configuration).listStatus(place):
            if (path := wanted.pop(str(status.getPath().getName()), "")) != "":
                states.append([path, status.getLen(), status.getModificationTime()])
        if wanted:
            raise KeyError(min(wanted))
    return sorted(states)


def find_difference(
    df: DataFrame, columns: Sequence[str], options: WriteOptions, written: Sequence[Manifest]
) -> str | None:
    """What distinguishes `df` from what `materialize` wrote, as the end of a sentence; None if nothing does."""
    names = list(dict.fromkeys(columns))
    types = options.find_types(df, names)
    for name, kind in types.items():
        before, _ = written[0].column(name).element
        if kind.dtype != before:
            return f"column {name!r} was {before} and is {kind.dtype}"
    # Answers without a job in the application that wrote the rows; most plans look different to another driver.
    if fingerprint_table(df, names, options) == written[0].fingerprint:
        return None
    rows = sum(manifest.rows for manifest in written)
    scan = TableScan(types, split=options.split_column)
    remaining = RowFilter(types, options.missing).apply(options.select(df, types))
    scan.observe(remaining).write.format("noop").mode("overwrite").save()
    return compare_digests(rows, written[0].content, scan.digest_rows())


def compare_digests(rows: int, content: str, now: str) -> str | None:
    """What changed, if anything. rows, content: of what was written; now: `TableScan.digest_rows` of the DataFrame."""
    number = int(now.partition("-")[0])
    if number != rows:
        return f"it had {rows} rows and has {number}"
    return "its rows have other values" if extract_row_digest(content) != now else None
