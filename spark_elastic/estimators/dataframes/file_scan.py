"""Which files a DataFrame is the rows of, if its plan does no more than select and rename columns of them.

Spark's explanation of the plan says so, on classic sessions and on Spark Connect alike; which version of a table of
Delta Lake or Iceberg it reads, only the driver's JVM knows. What is not recognized for certain is no such scan. Starts
no job. Runs in the caller's thread.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession

from spark_elastic.clusters.spark.host_facts import describe_jobs, has_context
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.dataframes.scan import quote
from spark_elastic.tables.footers import (
    CollectFooters,
    DataFile,
    FileFacts,
    collect_footers,
    collect_footers_in_threads,
)
from spark_elastic.tables.predicate import Predicate

_SHOWN_COLUMNS = 20  # of a node Spark shows 25, unless spark.sql.debug.maxToStringFields says otherwise
_SHOWN_CHARACTERS = 120
_TRANSPARENT = ("Project", "SubqueryAlias", "View", "Relation", "RelationV2")  # keep all rows as they are
# How Spark finds the files of a relation, where these are all that it has: no log says which of them count.
_PLAIN_INDEXES = ("InMemoryFileIndex", "CatalogFileIndex")
_ICEBERG = "org.apache.iceberg.spark.source.SparkTable"
_ICEBERG_OPTIONS = {"snapshot-id", "path"}
_WHOLE_ICEBERG = r"BatchScan .* \(branch=null\) \[filters=, groupedBy=\]"
_NAME = r"\w[\w .\-]*"


class NoFileScan(Exception):
    """A DataFrame is no scan of files; the reason is a clause, such as "its plan has Filter (x#0 > 1)"."""


@dataclass(frozen=True)
class FileScan:
    """The files whose rows a DataFrame has."""

    kind: str  # "parquet", "delta" or "iceberg"
    columns: Mapping[str, str]  # column of the DataFrame -> its name in the files or the table
    urls: tuple[str, ...]  # parquet: of the files; delta: of the table; iceberg: of its metadata file
    version: int | None = None  # version of Delta, or id of a snapshot of Iceberg


def find_file_scan(df: DataFrame, names: Sequence[str]) -> FileScan:
    """The scan that the columns `names` come from. Raises NoFileScan."""
    columns: dict[str, str] = {}
    scans = set()
    for first in range(0, len(names), _SHOWN_COLUMNS):
        part = list(names[first : first + _SHOWN_COLUMNS])
        selected = df.selectExpr(*map(quote, part))
        found, leaf = _read_plan(_explain(selected), part)
        columns.update(found)
        scans.add(leaf)
    if len(scans) > 1:  # each part of the columns has a plan of its own
        raise NoFileScan("its columns come from several sources")
    (leaf,) = scans
    if leaf == "iceberg":
        return _find_iceberg(selected, columns)
    return _find_files(selected, columns, leaf)


def estimate_bytes(df: DataFrame) -> float:
    """What Spark expects of the DataFrame, whose rows may take more; infinity if it does not tell."""
    try:
        frame: Any = vars(df)["_jdf"]
        return int(str(frame.queryExecution().optimizedPlan().stats().sizeInBytes()))
    except (
        Exception
    ) as error:  # Spark Connect, access is denied, or the plan cannot be optimized, as the fit will say
        log.debug("no size is known: %s", error)
        return math.inf


def _explain(df: DataFrame) -> str:
    frame: Any = vars(df).get("_jdf")
    if frame is None:  # Spark Connect
        explain: Any = getattr(df, "_explain_string")  # noqa: B009 - classic DataFrames have none
        return str(explain(extended=True))
    with _describe_failure("the cluster does not show its plan"):
        return str(frame.queryExecution().toString())


def _read_plan(explained: str, names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Column -> its name in the source, and the source: "iceberg", or the kind of index that finds the files."""
    analyzed, optimized, physical = (
        _find_section(explained, title)
        for title in ("Analyzed Logical Plan", "Optimized Logical Plan", "Physical Plan")
    )
    # Sources of version 2 take over filters and limits, which the optimized plan then does not show.
    for node in [*analyzed[1:], *optimized[:-1]]:
        if node.partition(" ")[0].partition("[")[0] not in _TRANSPARENT:
            raise NoFileScan(f"its plan has {_shorten(node)}")
    *projects, leaf = optimized
    relation = re.fullmatch(r"(?:Relation [^\[]*\[(.*)\] parquet|RelationV2\[([^\]]*)\] .*)", leaf)
    if relation is None:
        raise NoFileScan(f"its plan has {_shorten(leaf)}, which is no scan of Parquet, Delta or Iceberg")
    if len(projects) > 1:
        raise NoFileScan(f"its plan has {_shorten(projects[0])} over {_shorten(projects[1])}")
    if projects:
        columns = _match_columns(projects[0], projects[0][len("Project [") : -1].split(", "), names)
    else:
        columns = _match_columns(leaf, re.split(", ?", relation[1] or relation[2]), names)
    if relation[1] is None:
        if not any(re.search(_WHOLE_ICEBERG, line) for line in physical):
            raise NoFileScan(f"its plan has {_shorten(leaf)}, which is no whole table of Iceberg")
        return columns, "iceberg"
    found = [match[1] for line in physical if (match := re.search(r"Location: (\w+)", line))]
    return columns, found[0] if found else "source that Spark does not name"


def _find_section(explained: str, title: str) -> list[str]:
    """The lines of one of the plans, without the signs that show the tree."""
    _, _, rest = explained.partition(f"== {title} ==\n")
    lines = [line.lstrip(" :+-") for line in rest.partition("\n== ")[0].split("\n")]
    found = [line for line in lines if line]
    if not found:
        raise NoFileScan("Spark does not show its plan")
    return found


def _match_columns(node: str, listed: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Column -> its name in the source. listed: how the node shows its columns."""
    found = {}
    for name, shown in zip(names, listed, strict=False):
        match = re.fullmatch(rf"(?:({_NAME})#\d+L? AS )?{re.escape(name)}#\d+L?", shown)
        if match is None or len(listed) != len(names) or shown.startswith("NOT "):
            raise NoFileScan(f"its plan has {_shorten(node)}")
        found[name] = match[1] or name
    return found


def _shorten(node: str) -> str:
    return node if len(node) <= _SHOWN_CHARACTERS else f"{node[:_SHOWN_CHARACTERS]}..."


def _find_files(df: DataFrame, columns: Mapping[str, str], index: str) -> FileScan:
    """The files of a relation of version 1."""
    frame: Any = vars(df).get("_jdf")
    if index in _PLAIN_INDEXES:
        return FileScan("parquet", columns, tuple(sorted(_list_files(df, frame))))
    if frame is None:
        raise NoFileScan(
            f"its files are those of a {index}, whose version Spark Connect does not tell (fit_on_table takes one)"
        )
    with _describe_failure(f"its files are those of a {index}, which is not known here"):
        location = _find_leaf(frame).relation().location()
        if not str(location.getClass().getName()).startswith(
            ("org.apache.spark.sql.delta.", "com.databricks.")
        ):
            raise NoFileScan(f"its files are those of a {index}, which is not known here")
        url = unquote(str(location.path().toUri().toString())).removeprefix("file:")
        return FileScan("delta", columns, (url,), int(location.version()))


def _list_files(df: DataFrame, frame: Any) -> Sequence[str]:
    """Raises NoFileScan if a file is there twice, as its rows then are: `DataFrame.inputFiles` names it once."""
    if frame is None:  # Spark Connect has no list with repetitions
        names = sorted(path.rstrip("/") + "/" for path in _read_paths(_explain(df)))
        repeats = any(after.startswith(before) for before, after in pairwise(names))
        files = list(df.inputFiles())
    else:
        with _describe_failure("the cluster does not show its files"):
            files = list(_find_leaf(frame).relation().location().inputFiles())
        repeats = len(set(files)) < len(files)
    if repeats:
        raise NoFileScan("it reads a file several times")
    return files


def _read_paths(explained: str) -> Sequence[str]:
    """The paths that a relation reads, where it has several. Raises NoFileScan if Spark shortens their list."""
    count = re.search(r"Location: \w+\s?\((\d+) paths\)\[", explained)
    if count is not None and count[1] == "1":
        return []
    found = re.search(r"Location: \w+\s?\(\d+ paths\)\[(.*?)\], PartitionFilters", explained)
    paths = [] if found is None else found[1].split(", ")
    if count is None or len(paths) != int(count[1]) or "..." in paths:
        raise NoFileScan("Spark does not show all of its paths")
    return paths


def _find_iceberg(df: DataFrame, columns: Mapping[str, str]) -> FileScan:
    frame: Any = vars(df).get("_jdf")
    if frame is None:
        raise NoFileScan("it reads Iceberg, whose snapshot Spark Connect does not tell (use fit_on_table)")
    with _describe_failure("its source is not known here"):
        relation = _find_leaf(frame).relation()
        source, options = relation.table(), dict(relation.options())
        kind = str(source.getClass().getName())
        unknown = sorted(options.keys() - _ICEBERG_OPTIONS)
        if kind != _ICEBERG or unknown:
            raise NoFileScan(f"it reads {kind} with the options {unknown}, which is not known here")
        table, snapshot = source.table(), source.snapshotId()
        if str(table.getClass().getSimpleName()) != "BaseTable":
            raise NoFileScan(f"it reads the {table.getClass().getSimpleName()} of a table of Iceberg")
        if snapshot is None:
            snapshot = options.get("snapshot-id", table.currentSnapshot().snapshotId())
        file = table.operations().current().metadataFileLocation()
        return FileScan("iceberg", columns, (str(file).removeprefix("file:"),), int(snapshot))


def _find_leaf(frame: Any) -> Any:
    return frame.queryExecution().optimizedPlan().collectLeaves().apply(0)


@contextmanager
def _describe_failure(clause: str) -> Iterator[None]:
    """Raise NoFileScan with the clause where the JVM denies access, or has other classes than are known here."""
    from py4j.protocol import Py4JError  # clients of Spark Connect have no py4j
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        raise NoFileScan(clause) from error


MANY_FILES = 2_000  # fewer are read by threads of the driver before a Spark job has begun
FILES_PER_TASK = 500

log = logging.getLogger("spark_elastic")


def make_footer_collector(session: SparkSession) -> CollectFooters:
    """Collects footers on executors if there are many, and the session has a SparkContext; else in the driver."""

    def collect(
        store: Store, files: Sequence[DataFile], columns: Sequence[str], where: Predicate | None
    ) -> list[FileFacts]:
        if len(files) < MANY_FILES or not has_context(session):
            return collect_footers_in_threads(store, files, columns, where)
        parts = [files[start : start + FILES_PER_TASK] for start in range(0, len(files), FILES_PER_TASK)]
        task = partial(_read_part, store, list(columns), where)
        try:
            with describe_jobs(session, "reads footers"):
                answers = session.sparkContext.parallelize(parts, len(parts)).map(task).collect()
        except Exception as error:
            if "No module named" not in str(error):
                raise
            log.info("executors do not have this package yet: the driver reads %d footers", len(files))
            return collect_footers_in_threads(store, files, columns, where)
        found: list[FileFacts] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            found.extend(answer)
        return found

    return collect


def _read_part(
    store: Store, columns: Sequence[str], where: Predicate | None, files: Sequence[DataFile]
) -> list[FileFacts] | StoreError | InvalidInput:
    """Runs in a task. Spark would try an error again, and hide it in a trace."""
    try:
        return collect_footers(store, files, columns, where)
    except (StoreError, InvalidInput) as error:
        return error
