"""`where` over real files: the rows are those that pyarrow's own filter has, and no file is opened in vain."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.fit_rows import FileRows, Selection, materialize_rows, open_table_rows
from spark_elastic.runs.checkpoint import OwnedRun
from spark_elastic.tables import footers
from spark_elastic.tables.existing_parquet import describe_files, find_data_files
from spark_elastic.tables.lake_tables import read_snapshot
from spark_elastic.tables.predicate import Predicate
from spark_elastic.training import spec as fit_spec
from tests.leaks import SessionOwned
from tests.planned_rows import read_columns
from tests.unit.estimators.requests import request

ROWS, GROUP = 3000, 250
WHERES: list[Any] = [
    [("id", ">=", 1234)],
    [("id", "<", 250)],
    [("id", "==", 777)],
    [("id", "!=", 777)],
    [("id", "in", [3, 2999, -5])],
    [("id", "not in", {3, 2999})],
    [("same", "==", 5)],
    [("same", "<=", 5), ("id", ">", 2900)],
    [("x", ">", 0.5)],
    [("x", "!=", 0.25)],
    [("x", "not in", [0.25])],
    [("maybe", ">=", 0)],
    [("maybe", "<", 40), ("x", "<=", 0.9)],
    [("maybe", "not in", [1, 2])],
    [("word", "==", "b")],
    [("word", ">", "a"), ("day", "<", date(2020, 3, 1))],
    [("time", ">=", datetime(2020, 1, 1, 0, 30))],
    [[("id", "<", 10)], [("id", ">", 2990), ("word", "==", "c")]],
    [("odd", "==", True)],
]


@pytest.fixture(scope="module", autouse=True)
def runtime(session_owned: SessionOwned, tmp_path_factory: pytest.TempPathFactory) -> None:
    """deltalake's own event loop, which it keeps for the life of the process."""
    with session_owned.adopt():
        write_deltalake(str(tmp_path_factory.mktemp("first")), pa.table({"x": [1]}))


def make_table() -> pa.Table:
    draw = np.random.default_rng(3)
    ids = np.arange(ROWS)
    x = np.round(draw.random(ROWS) * 4) / 4
    x[::7] = np.nan
    return pa.table(
        {
            "id": ids,
            "same": pa.array([5] * ROWS, pa.int32()),
            "x": x,
            "maybe": pa.array([None if i % 5 == 0 or i < 600 else int(i) % 50 for i in ids], pa.int64()),
            "word": np.array(["a", "b", "c"])[ids // 1000],
            "day": pa.array(ids // 30 + 18262, pa.int32()).cast(pa.date32()),
            "time": pa.array(ids * 1_000_000 + 1_577_836_800_000_000, pa.timestamp("us")),
            "odd": ids % 2 == 1,
        }
    )


def expect(table: pa.Table, where: Any) -> list[int]:
    """By pyarrow, in which null is no match either once it is filled."""
    groups = [where] if isinstance(where[0], tuple) else where
    found = np.zeros(len(table), np.bool_)
    for group in groups:
        rows = np.ones(len(table), np.bool_)
        for name, operator, value in group:
            given = list(value) if "in" in operator else value
            one = table.filter(pq.filters_to_expression([(name, operator, given)]))["id"].to_numpy()
            rows &= np.isin(table["id"].to_numpy(), one) & table[name].is_valid().to_numpy()
        found |= rows
    return table["id"].to_numpy()[found].tolist()


def read_ids(store: Store, manifest: Manifest) -> list[int]:
    return sorted(read_columns(store, Manifest.from_json(manifest.to_json()), ["id"])["id"].tolist())


@pytest.mark.parametrize("piece_bytes", [1 << 20, 200])
@pytest.mark.parametrize("statistics", [True, False])
def test_the_rows_that_match_are_pyarrows(tmp_path: Path, statistics: bool, piece_bytes: int) -> None:
    table = make_table()
    for number, part in enumerate((table[:1100], table[1100:])):
        pq.write_table(part, tmp_path / f"{number}.parquet", GROUP, write_statistics=statistics)
    store, files = find_data_files([f"{tmp_path}/0.parquet", f"{tmp_path}/1.parquet"], [], {})
    for where in WHERES:
        found = describe_files(store, files, ["id"], piece_bytes=piece_bytes, where=Predicate.parse(where))
        assert read_ids(store, found) == expect(table, where), where
    with pytest.raises(InvalidInput, match="have no rows that match where"):
        describe_files(store, files, ["id"], where=Predicate.parse([("id", "<", 0)]))


TENTHS = [Decimal(each) for each in ("0.1", "0.05", "0.3", "0.5", "2")]
DECIMALS = pa.array(TENTHS, pa.decimal128(10, 2))
SINGLES, DOUBLES = (pa.array([float(each) for each in TENTHS], kind) for kind in (pa.float32(), pa.float64()))
ZEROS, HALVES = pa.array([0.0, -0.0, 1.5]), pa.array(np.array([1, 3, 9], np.float16))
UNSIGNED = pa.array([1, 2**63, 2**64 - 1, 5], pa.uint64())
WITH_NAN = pa.array([1.0, 2.0, 3.0, np.nan])


@pytest.mark.parametrize(
    ("keys", "operator", "value", "ids"),
    [
        (DECIMALS, ">=", 0.1, [0, 2, 3, 4]),
        (DECIMALS, "<=", Decimal("0.3"), [0, 1, 2]),
        (DECIMALS, "in", [Decimal("0.1"), Decimal("0.301"), Decimal(10) ** 12], [0]),
        (DECIMALS, "in", [0, np.int64(2), 10**30], [4]),
        (DECIMALS, "not in", [2, Decimal("0.3")], [0, 1, 3]),
        (DECIMALS, "in", [2, 0.1], [0, 4]),
        (DECIMALS.cast(pa.decimal128(38, 5)), "in", [0.3, Decimal("0.5")], [2, 3]),
        (SINGLES, "not in", [0.1, 0.5], [0, 1, 2, 4]),
        (DOUBLES, "in", np.array([0.1, 0.5]), [0, 3]),
        (pa.array([0, 5, 9], pa.uint64()), ">=", -1, [0, 1, 2]),
        (pa.array([0, 5, 9], pa.uint64()), "<", 2**64, [0, 1, 2]),
        (pa.array([0, 5, 9], pa.int8()), ">", 10**30, []),
        (pa.array([0, 5, 9], pa.int8()), "<=", np.int64(5), [0, 1]),
        (pa.array([0, 5, 9], pa.int8()), "<", 5.5, [0, 1]),
        (pa.array([0, 5, 9], pa.int8()), ">=", -np.inf, [0, 1, 2]),
        (HALVES, ">", np.float16(2), [1, 2]),
        (HALVES, "<=", 3, [0, 1]),
        (UNSIGNED, ">=", 2**63, [1, 2]),
        (UNSIGNED, "<", np.int32(5), [0]),
        (UNSIGNED, "in", [5, 2**63], [1, 3]),
        (SINGLES, "<", 0.1, [1]),
        (SINGLES, "<=", 1e300, [0, 1, 2, 3, 4]),
        (DOUBLES, "<", 10**400, [0, 1, 2, 3, 4]),
        # Python has no time after the year 9999, of which statistics tell all the same.
        (pa.array([0, 10**18], pa.timestamp("us")), "<", datetime(2024, 1, 1), [0]),
        (pa.array([1, 2000], pa.timestamp("ns")), ">", datetime(1970, 1, 1, microsecond=1), [1]),
    ],
)
def test_values_match_alike_whatever_the_statistics_of_a_file_say(
    tmp_path: Path, keys: pa.Array, operator: str, value: Any, ids: list[int]
) -> None:
    assert find_in_layouts(tmp_path, keys, ("k", operator, value)) == [ids] * 3


NOON = datetime(2024, 1, 2, 12)
DAYS = pa.array([date(2024, 1, 1), date(2024, 1, 2), date(2024, 1, 3)])


@pytest.mark.parametrize(
    ("keys", "value", "ids"),
    [
        (pa.array([1, 5, 9], pa.int32()), 2**40, []),
        (pa.array([1, 5, 9], pa.int32()), np.int64(5), [1]),
        (pa.array([1, 5, 9], pa.int8()), 5.0, [1]),
        (pa.array([1, 5, 9], pa.int8()), 5.5, []),
        (pa.array([1, 5, 9], pa.int8()), np.inf, []),
        (pa.array([1, 5, 9], pa.int64()), Decimal(5), [1]),
        (pa.array([1, 5, 9], pa.int64()), 10**30, []),
        (pa.array([0, 5, 9], pa.uint64()), -1, []),
        (pa.array([1, 2**53 + 1], pa.int64()), 2.0**53, []),
        (pa.array([1.0, 2.0**24], pa.float32()), 2**24 + 1, []),
        (pa.array([1.0, 2.0**53]), 2**53 + 1, []),
        (pa.array([Decimal("0.10"), Decimal("2.00")]), 10**30, []),
        (pa.array([Decimal("0.10"), Decimal("2.00")]), 1e30, []),
        (DAYS, NOON, []),
        (DAYS, datetime(2024, 1, 2), [1]),
        (DAYS.cast(pa.timestamp("us")), date(2024, 1, 2), [1]),
        (pa.array([NOON], pa.timestamp("ms")), NOON.replace(microsecond=1), []),
        (pa.array([NOON], pa.timestamp("ms")), NOON, [0]),
        (pa.array(["a", "b"], pa.large_string()), "b", [1]),
        (pa.array(np.array([1, 3, 9], np.float16)), np.float16(3), [1]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), b"cd", [1]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), b"abc", []),
        (pa.nulls(2), 5, []),
        (pa.array([1, 3]), None, []),
        (DECIMALS, 0.1, [0]),
        (DECIMALS, Decimal("0.1"), [0]),
        (DECIMALS, 2, [4]),
        (SINGLES, 0.1, []),
        (SINGLES, np.float32(0.1), [0]),
        (DOUBLES, np.float32(0.1), []),
        (DOUBLES, Decimal("0.1"), [0]),
        (ZEROS, 0.0, [0, 1]),
        (ZEROS.cast(pa.float32()), -0.0, [0, 1]),
        (UNSIGNED, 2**64 - 1, [2]),
        (UNSIGNED, np.uint64(2**63), [1]),
        (WITH_NAN, 1.0, [0]),
        (pa.array([1, 3, 9]), "3", None),
        (pa.array(["1", "3"]), 3, None),
        (pa.array([NOON]), NOON.replace(tzinfo=timezone.utc), None),
    ],
)
def test_a_value_is_in_a_list_if_it_equals_a_member(
    tmp_path: Path, keys: pa.Array, value: Any, ids: list[int] | None
) -> None:
    """ids: None: the value cannot be compared."""
    others = [each for each in range(len(keys)) if each not in (ids or ()) and keys[each].is_valid]
    alike, different = [("==", value), ("in", [value])], [("!=", value), ("not in", [value])]
    for operator, given in (*alike, *different):
        expected = ids if (operator, given) in alike else others
        if ids is None:
            with pytest.raises(InvalidInput, match="cannot be: give a value of the column's type"):
                find_in_layouts(tmp_path, keys, ("k", operator, given))
        else:
            assert find_in_layouts(tmp_path, keys, ("k", operator, given)) == [expected] * 3


def test_a_list_may_have_values_of_several_types(tmp_path: Path) -> None:
    assert find_in_layouts(tmp_path, pa.array([1, 5, 9]), ("k", "in", [5, 2**70, 9.0, 0.5])) == [[1, 2]] * 3
    assert find_in_layouts(tmp_path, DAYS, ("k", "in", [date(2024, 1, 3), NOON])) == [[2]] * 3


def find_in_layouts(folder: Path, keys: pa.Array, where: Any) -> list[list[int]]:
    """The numbers of the rows that match: by statistics of each row, by those of all rows, and by values alone."""
    found: list[list[int]] = []
    # One row matches in any case, since files without rows that match are refused.
    table = pa.table({"id": [*range(len(keys)), -1], "k": pa.concat_arrays([keys, pa.nulls(1, keys.type)])})
    for size, statistics in ((1, True), (len(table), True), (len(table), False)):
        pq.write_table(table, folder / "0.parquet", size, write_statistics=statistics)
        store, files = find_data_files([f"{folder}/0.parquet"], [], {})
        either = Predicate.parse([[where], [("id", "==", -1)]])
        found.append(read_ids(store, describe_files(store, files, ["id"], where=either))[1:])
    return found


def test_files_and_row_groups_without_rows_match_nothing(tmp_path: Path) -> None:
    words = pa.table({"id": [1, 2], "word": pa.array(["a", "b"]).dictionary_encode()})
    for number, part in enumerate((words[:0], words)):
        pq.write_table(part, tmp_path / f"{number}.parquet", write_statistics=False)
    store, files = find_data_files([f"{tmp_path}/0.parquet", f"{tmp_path}/1.parquet"], [], {})
    where = Predicate.parse([("word", "==", "b")])
    assert read_ids(store, describe_files(store, files, ["id"], where=where)) == [2]


def test_partitions_and_deleted_rows_of_delta_count_and_excluded_files_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table()
    write_deltalake(str(tmp_path), table, partition_by=["word", "day"])
    DeltaTable(tmp_path).delete("id % 10 = 3")
    opened, read_footer = [], footers.read_footer

    def note(store: Store, name: str) -> Any:
        opened.append(name)
        return read_footer(store, name)

    monkeypatch.setattr(footers, "read_footer", note)
    snapshot = read_snapshot(tmp_path, None, {})
    for where, folders in (
        ([("word", "==", "b"), ("day", "<", date(2020, 2, 10))], "word=b/day=2020-02-0"),
        ([("word", "in", ["a"]), ("day", "==", date(2020, 1, 3)), ("x", ">", 0.3)], "word=a/day=2020-01-03"),
    ):
        opened.clear()
        asked = Predicate.parse(where)
        found = describe_files(snapshot.store, snapshot.files, ["id", "word"], True, where=asked)
        ids = [each for each in expect(table, where) if each % 10 != 3]
        assert read_ids(snapshot.store, found) == ids
        assert ids
        assert opened
        assert all(name.startswith(folders) for name in opened)
    with pytest.raises(InvalidInput, match=r"column 'word', which is string, with 5 .*: give a value of"):
        describe_files(snapshot.store, snapshot.files, ["id"], where=Predicate.parse([("word", "==", 5)]))


def test_partitions_by_time_and_by_bool_are_compared_or_refused(tmp_path: Path) -> None:
    ids = np.arange(6)
    time = pa.array((ids % 3) * 86_400_000_000, pa.timestamp("us", "UTC"))
    table = pa.table({"id": ids, "time": time, "odd": ids % 2 == 1})
    write_deltalake(str(tmp_path), table, partition_by=["time", "odd"])
    snapshot = read_snapshot(tmp_path, None, {})

    def find(*where: Any) -> list[int]:
        found = describe_files(snapshot.store, snapshot.files, ["id"], where=Predicate.parse(where))
        return read_ids(snapshot.store, found)

    assert find(("time", ">", datetime(1970, 1, 2, tzinfo=timezone.utc))) == [2, 5]
    assert find(("odd", "==", np.False_)) == find(("odd", "!=", True)) == [0, 2, 4]
    says = r"'time', which is timestamp\[us, tz=UTC\], with datetime.* cannot be: give"
    with pytest.raises(InvalidInput, match=says):
        find(("time", ">", datetime(1970, 1, 2)))


FLOATS, WHOLE = pa.array([1.5, np.nan, 2.5, np.inf]), pa.array([1, 2, None])


@pytest.mark.parametrize(
    ("keys", "operator", "value", "ids"),
    [
        (WITH_NAN, "==", np.nan, []),
        (WITH_NAN, "!=", np.nan, [0, 1, 2, 3]),
        (WITH_NAN, "in", [1.0, np.nan], [0]),
        (WITH_NAN, "not in", [1.0, np.nan], [1, 2, 3]),
        (WITH_NAN, "<", np.nan, []),
        (WHOLE, "not in", [1.0, np.nan], [1]),
        (FLOATS, "!=", 1.5, [1, 2, 3]),
        (FLOATS, ">", 1.0, [0, 2, 3]),
        (FLOATS, "<=", 100.0, [0, 2]),
        (FLOATS, "not in", [2.5], [0, 1, 3]),
        (WHOLE, "in", [], []),
        (WHOLE, "not in", [], [0, 1]),
        (pa.array(["a", "b", None]), "in", [], []),
        (pa.array(["a", "b", None]), "not in", [], [0, 1]),
    ],
)
def test_nan_and_empty_lists_match_alike_in_partitions_and_in_columns(
    tmp_path: Path, keys: pa.Array, operator: str, value: Any, ids: list[int]
) -> None:
    assert find_in_layouts(tmp_path, keys, ("k", operator, value)) == [ids] * 3
    assert find_in_partitions(tmp_path / "partitions", keys, ("k", operator, value)) == ids


def test_texts_are_compared_with_partitions_of_texts_and_refused_for_those_of_numbers(tmp_path: Path) -> None:
    months, mixed = pa.array([1, 9, 10, 12]), pa.array(["1", "9", "10", "b"])
    for number, (operator, value) in enumerate([(">=", "9"), ("==", "9"), ("in", ["9"])]):
        where = "k", operator, value
        says = r"column 'k', which is int64, with .*9.* cannot be: give a value of"
        with pytest.raises(InvalidInput, match=says):
            find_in_partitions(tmp_path / f"months{number}", months, where)
        assert 1 in find_in_partitions(tmp_path / f"mixed{number}", mixed, where)
    assert find_in_partitions(tmp_path / "months", months, ("k", ">=", 9)) == [1, 2, 3]


def find_in_partitions(folder: Path, keys: pa.Array, where: Any) -> list[int]:
    """The numbers of the rows that match, in a table that is partitioned by the keys."""
    table = pa.table({"id": [*range(len(keys)), -1], "k": pa.concat_arrays([keys, pa.nulls(1, keys.type)])})
    write_deltalake(str(folder), table, partition_by=["k"])
    snapshot = read_snapshot(folder, None, {})
    either = Predicate.parse([[where], [("id", "==", -1)]])
    return read_ids(snapshot.store, describe_files(snapshot.store, snapshot.files, ["id"], where=either))[1:]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("id > 3", "where must be a list of comparisons"),
        ([], "where must be a list of comparisons"),
        ([("id", "=", 3)], "where must be a list of comparisons"),
        ([("id", "in", 3)], "where must be a list of comparisons"),
        ([("id", "==", [3])], "where must be a list of comparisons"),
        ([("none", "==", 3)], "where compares column 'none', which is missing in '0.parquet'"),
        ([("v", "==", 3)], "where compares column 'v', which is list<.*>"),
        ([("id", "==", "three")], r"where compares column 'id', which is int64, with 'three' \(str\)"),
    ],
)
def test_what_cannot_be_compared_gets_a_sentence(tmp_path: Path, where: Any, says: str) -> None:
    pq.write_table(pa.table({"id": [1, 2], "v": [[1], [2]]}), tmp_path / "0.parquet")
    store, files = find_data_files([f"{tmp_path}/0.parquet"], [], {})
    with pytest.raises(InvalidInput, match=says):
        describe_files(store, files, ["id"], where=Predicate.parse(where))


def test_a_selection_is_known_by_all_of_its_values_in_any_process() -> None:
    def digest(values: Any) -> str:
        return Selection.parse(None, [("word", "in", values)]).digest

    assert digest({"d", "b", "a", "c"}) == digest(["a", "b", "c", "d"])
    many = np.arange(3000)
    assert digest(many) == digest(many.copy())
    assert digest(many) != digest(np.where(many == 1500, -1, many))


def open_rows(asked: Any, *tables: Any, columns: Any = None, where: Any = None) -> FileRows:
    """tables: to train on, the version of it, and one to validate with."""
    session: Any = SimpleNamespace()
    rows = open_table_rows(session, *tables, {}, Selection.parse(columns, where))
    rows.check(asked)
    return rows


def test_a_run_keeps_to_version_columns_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = str(tmp_path / "table"), Store.open(str(tmp_path / "store"))
    table = make_table()
    write_deltalake(folder, table)
    asked = request(feature_cols=("feature",), label_cols=("same",))
    opens = partial(open_rows, asked, folder, None, None)
    columns, where = {"feature": "id"}, [("maybe", ">", 20), ("word", "==", "c")]
    for _ in range(2):
        run = OwnedRun.acquire(store, "mine")
        with materialize_rows(opens(columns=columns, where=where), asked, store, run) as (record, data):
            found = read_columns(data, record.load_manifest())["feature"]
            assert sorted(found.tolist()) == expect(table, where)
        write_deltalake(folder, table, mode="append")  # a resumed run takes the version that it began with
    for other in {"columns": columns, "where": where[:1]}, {"columns": {"feature": "maybe"}, "where": where}:
        with pytest.raises(InvalidInput, match="'mine' began with other values of columns or where"):
            opens(**other).check_same_rows(asked, record, "mine")
    with pytest.raises(InvalidInput, match=r"columns names 'maybee', which version 2 of .* has .*'maybe'"):
        opens(columns={"feature": "maybee"})
    with pytest.raises(InvalidInput, match="columns must be a dict"):
        Selection.parse(["id"], None)
    monkeypatch.setattr(fit_spec, "check_reader", lambda name: None)  # as where petastorm is installed
    with pytest.raises(InvalidInput, match="fit_on_table needs reader='arrow'"):
        opens(columns=columns).check(request(reader="petastorm"))


def test_a_run_keeps_to_its_tables_of_which_several_lie_in_one_folder(tmp_path: Path) -> None:
    a, b, seen = tables = [str(tmp_path / name) for name in ("a", "b", "seen")]
    for name in tables:
        write_deltalake(name, make_table())
    asked, store = request(feature_cols=("id",), label_cols=("same",)), Store.open(str(tmp_path / "store"))
    run = OwnedRun.acquire(store, "mine")
    with materialize_rows(open_rows(asked, a, None, seen), asked, store, run) as (record, _):
        pass
    write_deltalake(a, make_table(), mode="append")
    open_rows(asked, a, None, seen).check_same_rows(asked, record, "mine")
    for trained, validated in (b, seen), (a, b), (seen, a):
        with pytest.raises(InvalidInput, match="'mine' began with other files than those now in file:"):
            open_rows(asked, trained, None, validated).check_same_rows(asked, record, "mine")
