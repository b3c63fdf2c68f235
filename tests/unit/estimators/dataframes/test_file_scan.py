"""Which DataFrames are scans of files: what Spark 3.5 and 4.3 and Iceberg's connector say of their plans, and a JVM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.estimators.dataframes.file_scan import NoFileScan, find_file_scan

LEAF = "Relation [x#5L,y#6,k#8] parquet"
TABLE = "Relation spark_catalog.default.tt[x#5L,y#6,k#8] parquet"
FILES = (
    "FileScan parquet [x#5L,y#6] Batched: true, DataFilters: [], Format: Parquet, Location: "
    "{}(1 paths)[file:/data/t], PartitionFilters: [], PushedFilters: [], ReadSchema: struct<x:bigint,y:double>"
)
ICEBERG = "BatchScan ice.n.t[x#46L, k#48] ice.n.t (branch=null) [filters=, groupedBy=] RuntimeFilters: []"


def explain(analyzed: str, optimized: str, physical: str) -> str:
    """As QueryExecution.toString has it."""
    return (
        f"== Parsed Logical Plan ==\n'Project ['x]\n+- {LEAF}\n\n"
        f"== Analyzed Logical Plan ==\nx: bigint, y: double\n{analyzed}\n\n"
        f"== Optimized Logical Plan ==\n{optimized}\n\n"
        f"== Physical Plan ==\n*(1) ColumnarToRow\n+- {physical}\n"
    )


def named(name: str, **methods: Any) -> Any:
    """An object of the JVM: its class, and what its methods return."""
    kind = SimpleNamespace(getName=lambda: name, getSimpleName=lambda: name.rpartition(".")[2])
    found = {key: (lambda value=value: value) for key, value in methods.items()}
    return SimpleNamespace(getClass=lambda: kind, **found)


class Frame:
    """What `find_file_scan` asks of a DataFrame. leaf: of its plan in the JVM; None: a client of Spark Connect."""

    def __init__(self, explained: str, leaf: Any = None) -> None:
        self._explained = explained
        plan = named("", collectLeaves=SimpleNamespace(apply=lambda number: leaf))
        query = SimpleNamespace(toString=lambda: explained, optimizedPlan=lambda: plan)
        self._jdf = None if leaf is None else SimpleNamespace(queryExecution=lambda: query)

    def selectExpr(self, *columns: Any) -> Frame:
        return self

    def inputFiles(self) -> list[str]:
        return ["file:///data/t/b.parquet", "file:///data/t/a.parquet"]

    def _explain_string(self, extended: bool) -> str:
        assert extended
        return self._explained


PROJECT = f"Project [x#5L, y#6]\n+- {LEAF}"


def test_a_file_that_is_read_twice_has_its_rows_twice_and_is_no_scan() -> None:
    explained = explain(PROJECT, PROJECT, FILES.format("InMemoryFileIndex"))

    def classic(*files: str) -> Any:
        location = named("InMemoryFileIndex", inputFiles=list(files))
        return Frame(explained, named("", relation=named("", location=location)))

    def client(*roots: str) -> Any:
        shown = f"({len(roots)} paths)[{', '.join(roots)}]"
        return Frame(explained.replace("(1 paths)[file:/data/t]", shown))

    alone: list[Any] = [classic("file:///b", "file:///a"), client("file:/data/t", "file:/data/t2", "file:/u")]
    for frame in alone:
        assert len(find_file_scan(frame, ["x", "y"]).urls) == 2
    twice = [
        classic("file:///a", "file:///a"),
        client("file:/data/t", "file:/u", "file:/data/t"),
        client("file:/data/t", "file:/data/t2", "file:/data/t/a.parquet"),
    ]
    for frame in twice:
        with pytest.raises(NoFileScan, match="it reads a file several times"):
            find_file_scan(frame, ["x", "y"])


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        ("(1 paths)[file:/data/a long pa...", None),
        ("(2 paths)[file:/data/a long path, file:/dat...", "does not show all of its paths"),
        ("(2 paths)[file:/data/a long path, ...]", "does not show all of its paths"),
        ("(3 paths)[file:/data/a long path, ...]", "does not show all of its paths"),
    ],
)
def test_paths_that_spark_shortens_may_repeat_and_are_no_scan(shown: str, says: str | None) -> None:
    explained = explain(PROJECT, PROJECT, FILES.format("InMemoryFileIndex"))
    frame: Any = Frame(explained.replace("(1 paths)[file:/data/t]", shown))
    if says is None:
        assert len(find_file_scan(frame, ["x", "y"]).urls) == 2
        return
    with pytest.raises(NoFileScan, match=says):
        find_file_scan(frame, ["x", "y"])


@pytest.mark.parametrize(
    ("analyzed", "optimized", "says"),
    [
        (PROJECT, f"Project [-x#5L AS x#9L, y#6]\n+- {LEAF}", r"has Project \[-x#5L AS x#9L, y#6\]"),
        (PROJECT, f"Project [NOT x#5 AS x#9, y#6]\n+- {LEAF}", r"has Project \[NOT x#5 AS"),
        (PROJECT, f"Project [cast(x#5L as double) AS x#9, y#6]\n+- {LEAF}", r"cast\(x#5L as double\)"),
        (PROJECT, f"Project [coalesce(x#5L, 0) AS x#9, y#6]\n+- {LEAF}", "coalesce"),
        (PROJECT, f"Project [x#5L + y#6 AS x#9, y#6]\n+- {LEAF}", r"x#5L \+ y#6"),
        (PROJECT, f"Project [x#5L, ... 1 more fields]\n+- {LEAF}", "1 more fields"),
        (PROJECT, f"Project [x#5L, x#9]\n+- {LEAF}", "x#9"),
        ("LogicalRDD [x#1L], false", "LogicalRDD [x#1L], false", "has LogicalRDD"),
        (PROJECT.replace("parquet", "csv"), PROJECT.replace("parquet", "csv"), "which is no scan of Parquet"),
        ("", "", "Spark does not show its plan"),
    ],
)  # fmt: skip
def test_whatever_else_a_plan_has_is_named(analyzed: str, optimized: str, says: str) -> None:
    frame: Any = Frame(explain(analyzed, optimized, FILES.format("InMemoryFileIndex")))
    with pytest.raises(NoFileScan, match=says):
        find_file_scan(frame, ["x", "y"])


def test_a_table_with_more_columns_than_spark_shows_is_asked_for_in_parts() -> None:
    names = [f"c{number}" for number in range(45)]
    asked = []

    class Wide(Frame):
        def selectExpr(self, *columns: str) -> Frame:
            asked.append(len(columns))
            project = f"Project [{', '.join(f'{name[1:-1]}#7L' for name in columns)}]\n+- {LEAF}"
            return Frame(explain(project, project, FILES.format("InMemoryFileIndex")))

    wide: Any = Wide("")
    assert find_file_scan(wide, names).columns == {name: name for name in names}
    assert asked == [20, 20, 5]


# ---- tables whose log says which files count

PLAN = "Project [x#46L AS a#63L, k#48]\n+- SubqueryAlias ice.n.t\n   +- RelationV2[x#46L, y#47, k#48] ice.n.t ice.n.t"
# Iceberg takes over a filter of partitions: only the first plan has it.
FILTERED = PLAN.replace("+- Sub", "+- Filter (k#48 = 1)\n+- Sub")
PRUNED = "Project [x#46L AS a#63L, k#48]\n+- RelationV2[x#46L, k#48] ice.n.t"


def iceberg(
    snapshot: int | None, options: dict[str, str], table: str = "org.apache.iceberg.BaseTable"
) -> Any:
    operations = named("", current=named("", metadataFileLocation="file:/data/t/metadata/v3.metadata.json"))
    inner = named(table, currentSnapshot=named("", snapshotId=512), operations=operations)
    source = named("org.apache.iceberg.spark.source.SparkTable", table=inner, snapshotId=snapshot)
    return named("", relation=named("", table=source, options=options))


@pytest.mark.parametrize(
    ("snapshot", "options", "version"), [(None, {}, 512), (833, {}, 833), (None, {"snapshot-id": "833"}, 833)]
)
def test_a_scan_of_iceberg_is_a_snapshot(snapshot: int | None, options: dict[str, str], version: int) -> None:
    frame: Any = Frame(explain(PLAN, PRUNED, ICEBERG), iceberg(snapshot, options))
    found = find_file_scan(frame, ["a", "k"])
    assert (found.kind, found.version, found.columns) == ("iceberg", version, {"a": "x", "k": "k"})
    assert found.urls == ("/data/t/metadata/v3.metadata.json",)


@pytest.mark.parametrize(
    ("analyzed", "physical", "leaf", "says"),
    [
        (FILTERED, ICEBERG, iceberg(None, {}), r"has Filter \(k#48 = 1\)"),
        (PLAN, ICEBERG.replace("=,", "=k IS NOT NULL, k = 1,"), iceberg(None, {}), "no whole table of Ice"),
        (PLAN, ICEBERG.replace("null", "b"), iceberg(None, {}), "no whole table of Iceberg"),
        (PLAN, ICEBERG, iceberg(None, {"as-of-timestamp": "1"}), "as-of-timestamp"),
        (PLAN, ICEBERG, iceberg(None, {}, "org.apache.iceberg.FilesTable"), "the FilesTable of a table of"),
        (PLAN, ICEBERG, None, "whose snapshot Spark Connect does not tell"),
    ],
)
def test_a_part_of_a_table_of_iceberg_is_no_scan(analyzed: str, physical: str, leaf: Any, says: str) -> None:
    frame: Any = Frame(explain(analyzed, PRUNED, physical), leaf)
    with pytest.raises(NoFileScan, match=says):
        find_file_scan(frame, ["a", "k"])


def delta(package: str) -> Any:
    path = named("", toUri=SimpleNamespace(toString=lambda: "file:/tables/a%20b"))
    location = named(f"{package}.PreparedDeltaFileIndex", path=path, version=7)
    return named("", relation=named("", location=location))


def test_a_scan_of_delta_is_bound_to_its_version() -> None:
    explained = explain(PROJECT, PROJECT, FILES.format("PreparedDeltaFileIndex"))
    frame: Any = Frame(explained, delta("org.apache.spark.sql.delta.stats"))
    found = find_file_scan(frame, ["x", "y"])
    assert (found.kind, found.urls, found.version) == ("delta", ("/tables/a b",), 7)


def test_files_that_another_log_counts_are_no_scan() -> None:
    explained = explain(PROJECT, PROJECT, FILES.format("HoodieFileIndex"))
    frames: list[Any] = [Frame(explained, delta("org.apache.hudi")), Frame(explained)]
    with pytest.raises(NoFileScan, match="those of a HoodieFileIndex, which is not known here"):
        find_file_scan(frames[0], ["x", "y"])
    with pytest.raises(NoFileScan, match="HoodieFileIndex, whose version Spark Connect does not tell"):
        find_file_scan(frames[1], ["x", "y"])
