"""Columns of arrays whose lengths differ, from files to steps: as they are, and packed into sequences."""

from __future__ import annotations

import decimal
import hashlib
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Column, Manifest, RowGroups, pack_deleted
from spark_elastic.data.packing import Packing, Ragged
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.decoding import nbytes
from spark_elastic.data.reading.readers import open_reader, pack_rows
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.tables.existing_parquet import (
    align_ragged,
    describe_files,
    describe_parquet,
    find_data_files,
)
from spark_elastic.tables.predicate import Predicate
from tests.planned_rows import read_columns

LENGTH = 64


def write(folder: Path, columns: dict[str, Any], name: str = "a.parquet", **options: Any) -> Store:
    pq.write_table(pa.table(columns), folder / name, **options)
    return Store.open(str(folder))


KINDS = {
    "int32": [[1, 2, 3], [], [4], [5, 6]],
    "float64": [[0.5], [1.5, 2.5], [], []],
    "bool": [[True, False], [True], [], [False] * 9],
    "object": [["a", "bc"], ["d"], [], ["efg"] * 3],
    "datetime64[D]": [[1, 2], [3], [], [4]],
}
ARROW = {"int32": pa.int32(), "float64": pa.float64(), "bool": pa.bool_(), "object": pa.string()}


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("dtype", KINDS)
def test_a_row_is_a_read_only_view_of_its_own_values(
    tmp_path: Path, dtype: str, statistics: bool, piece_bytes: int
) -> None:
    rows = KINDS[dtype] * 3
    kind = pa.list_(ARROW.get(dtype, pa.int32()))
    values = pa.array(rows, kind)
    if dtype not in ARROW:
        values = values.cast(pa.list_(pa.date32()))
    ids = np.arange(len(rows))
    store = write(tmp_path, {"x": values, "id": ids}, row_group_size=5, write_statistics=statistics)
    manifest = describe_parquet(store, ["x", "id"], transformed=True, piece_bytes=piece_bytes)
    assert manifest.columns == (Column("x", "object", ragged=dtype), Column("id", "int64"))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert len(manifest.row_groups) == (len(rows) if piece_bytes == 1 else 3)
    found = read_columns(store, manifest)
    assert (found["x"].dtype, found["x"].shape) == (object, (len(rows),))
    for row, expected in zip(found["x"], rows, strict=True):
        assert row.dtype == np.dtype(dtype)
        assert not row.flags.writeable
        assert (row.astype(int) if dtype not in ARROW else row).tolist() == expected
    if dtype != "object":
        assert nbytes({"x": found["x"]}) == sum(120 + row.nbytes for row in found["x"])


LONG = [[1, 2]] * 40_000
FIXED = pa.list_(pa.int64(), 2)


@pytest.mark.parametrize(
    ("parts", "ragged"),
    [
        ([[[1, 2], [3, 4]]], False),
        ([[[1, 1], [2], [3, 3, 3]]], True),  # lengths that add up by chance
        ([[[1], [2]], [[1], []]], True),  # Parquet has a value for an empty array as well
        ([[[]], [[]]], True),
        ([[*LONG, [1]]], True),  # behind the rows that are looked at
        ([pa.array([[1, 2]], FIXED), pa.array([[1, 2, 3]], pa.list_(pa.int64(), 3))], True),
        ([pa.array([[1, 2]], FIXED), pa.array([[3, 4]], FIXED)], False),
        ([pa.array([[decimal.Decimal("1.5")], []], pa.list_(pa.decimal128(5, 2)))], True),
        ([pa.array([[1, 2], [3]], pa.large_list(pa.int64()))], True),
    ],
)
def test_arrays_of_one_length_stay_what_they_are(tmp_path: Path, parts: list[Any], ragged: bool) -> None:
    for number, part in enumerate(parts):
        values = part if isinstance(part, pa.Array) else pa.array(part, pa.list_(pa.int64()))
        store = write(tmp_path, {"x": values}, f"{number}.parquet")
    (column,) = (manifest := describe_parquet(store, ["x"], transformed=True)).columns
    assert bool(column.ragged) == ragged
    expected = [row for part in parts for row in (part.to_pylist() if isinstance(part, pa.Array) else part)]
    assert [row.tolist() for row in read_columns(store, manifest)["x"]] == expected


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[1, 2], [3]], "have different lengths: .* pack them .* or give a transformation_fn"),
        ([[], [3]], "begins with an empty array"),
        ([[1, 2], None], "has 1 nulls in 2 rows"),
        ([[1, 2], [None]], "has 1 nulls in 2 rows"),
    ],
)
def test_arrays_that_no_model_takes_are_refused(tmp_path: Path, rows: list[Any], says: str) -> None:
    store = write(tmp_path, {"x": pa.array(rows, pa.list_(pa.int64()))})
    with pytest.raises(InvalidInput, match=says):
        describe_parquet(store, ["x"], transformed="nulls" in says)


def test_nested_arrays_of_different_lengths_are_refused_for_a_transformation_too(tmp_path: Path) -> None:
    store = write(tmp_path, {"x": pa.array([[[1, 2]], [[3], [4, 5]]])})
    with pytest.raises(InvalidInput, match=r"different lengths: .*; pad or cut them to one length\."):
        describe_parquet(store, ["x"], transformed=True)


@pytest.mark.parametrize("kept_alike", [True, False])
@pytest.mark.parametrize("by_where", [True, False])
def test_only_rows_of_the_table_decide_on_lengths(tmp_path: Path, kept_alike: bool, by_where: bool) -> None:
    rows = [*LONG, [1], *([] if kept_alike else [[1, 2, 3, 4]])]
    ids = np.arange(len(rows))
    write(tmp_path, {"x": pa.array(rows), "id": ids})
    store, (file,) = find_data_files([f"file://{tmp_path}/a.parquet"], ["x"], {})
    gone = ids == len(LONG)
    where = Predicate.parse([("id", "!=", len(LONG))]) if by_where else None
    file = file if by_where else replace(file, deleted=gone)
    manifest = describe_files(store, [file], ["x"], transformed=True, where=where)
    assert bool(manifest.column("x").ragged) != kept_alike
    assert [row.tolist() for row in read_columns(store, manifest)["x"]] == [
        row for row, lost in zip(rows, gone, strict=True) if not lost
    ]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[list[int]]]:
    """Two files with documents, of which each token is a number of its own."""
    folder, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(4)
    lengths = np.minimum(LENGTH, rng.lognormal(np.log(LENGTH / 5) - 0.5, 1, 5000).astype(int))
    ends = np.cumsum(lengths)
    rows = [list(range(end - size + 1, end + 1)) for end, size in zip(ends, lengths, strict=True)]
    table = {
        "input_ids": pa.array(rows, pa.list_(pa.int32())),
        "labels": pa.array([[-token for token in row] for row in rows], pa.list_(pa.int64())),
        "size": lengths,
        "wrong": lengths // 2,
        "at_most_32": np.minimum(32, lengths),
        "text": [str(row) for row in range(len(rows))],
    }
    pq.write_table(pa.table(table).slice(0, 3500), folder / "a.parquet", row_group_size=400)
    pq.write_table(pa.table(table).slice(3500), folder / "b.parquet", row_group_size=1000)
    return Store.open(str(folder)), rows


def digest_epoch(store: Store, manifest: Manifest, names: list[str], sizes: list[int]) -> str:
    """Of the stream of (step, row) and all values; the world changes its size after each third of an epoch."""
    plan = DataPlan.for_run(manifest.group_rows, 48, 7, 8, manifest.max_decoded_group_bytes(), 64 << 20)
    found = hashlib.sha256()
    cuts = [plan.steps * part // len(sizes) for part in range(len(sizes) + 1)]
    with closing(open_reader("arrow", store, manifest, names)) as reader:
        made = StepLoader(plan, reader, tuple(map(manifest.column, names)))
        for size, (first, past) in zip(sizes, pairwise(cuts), strict=True):
            taken: dict[int, list[Any]] = {}
            for rank in range(size):
                with made.steps(1, first, rank, size) as stream:
                    for _ in range(first, past):
                        rows = next(stream)
                        taken.setdefault(rows.step, []).append(rows)
            for step in range(first, past):
                ids = [row for part in taken[step] for row in part.row_ids.tolist()]
                found.update(repr((step, ids)).encode())
                for name in names:
                    values = [row for part in taken[step] for row in part.columns[name]]
                    found.update(Ragged.of(values).values.tobytes() if len(values[0]) else b"")
    return found.hexdigest()


@pytest.mark.parametrize("is_packed", [False, True])
def test_p2_the_stream_of_tokens_is_the_same_in_any_world_and_after_a_resume(
    documents: tuple[Store, list[list[int]]], is_packed: bool
) -> None:
    store, _ = documents
    manifest = describe_parquet(store, ["input_ids"], transformed=True)
    names = ["input_ids"]
    if is_packed:
        manifest = pack_rows(store, manifest, Packing(length=LENGTH))
        names = ["input_ids", "document_ids", "position_ids", "labels"]
    alone = digest_epoch(store, manifest, names, [1])
    for sizes in ([2], [3], [8], [4, 1, 6]):
        assert digest_epoch(store, manifest, names, sizes) == alone


@pytest.mark.parametrize("options", [{}, {"length_column": "size"}, {"along": {"labels": 0}}])
def test_p1_each_token_of_each_document_is_in_one_sequence(
    documents: tuple[Store, list[list[int]]], options: dict[str, Any]
) -> None:
    store, rows = documents
    source = describe_parquet(store, ["input_ids", "labels", "size"], transformed=True)
    manifest = pack_rows(store, source, Packing(length=LENGTH, **options))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.hash != pack_rows(store, source, Packing(length=LENGTH, pad_id=1, **options)).hash
    found = read_columns(store, manifest)
    tokens, labels = found["input_ids"], found["labels"]
    assert tokens.shape == (manifest.rows, LENGTH)
    assert np.array_equal(np.sort(tokens[tokens > 0]), np.arange(1, sum(map(len, rows)) + 1))
    assert 1 - np.count_nonzero(tokens) / tokens.size < 0.03
    begins = (found["position_ids"] == 0) & (tokens > 0)
    assert set(tokens[begins].tolist()) == {row[0] for row in rows if row}
    inside = (tokens > 0) & ~begins
    assert (labels[~inside] == -100).all()
    assert np.array_equal(labels[inside], tokens[inside] * (-1 if "along" in options else 1))


def test_some_of_the_sequences_are_those_among_all(documents: tuple[Store, list[list[int]]]) -> None:
    store, _ = documents
    source = describe_parquet(store, ["input_ids"], transformed=True)
    manifest = pack_rows(store, source, Packing(length=LENGTH))
    whole = read_columns(store, manifest)
    first, second, *_ = manifest.row_groups
    gone = np.arange(second.rows) % 3 == 0
    part = replace(second, deleted=pack_deleted(gone), rows=int(np.count_nonzero(~gone)))
    found = read_columns(store, replace(manifest, row_groups=RowGroups.of([part])))
    for name, values in found.items():
        assert np.array_equal(values, whole[name][first.rows :][: second.rows][~gone])


def test_what_cannot_be_packed_is_refused(documents: tuple[Store, list[list[int]]]) -> None:
    store, _ = documents
    source = describe_parquet(store, ["input_ids", "wrong", "at_most_32", "text", "size"], transformed=True)
    for packing, says in (
        (Packing(length=LENGTH, column="text"), "column 'text' has no arrays of numbers"),
        (Packing(length=LENGTH, column="tokens"), "has no column 'tokens'"),
        (Packing(length=32), r"has \d+ documents of more than 32 tokens, the longest of 64: raise length"),
    ):
        with pytest.raises(InvalidInput, match=says):
            pack_rows(store, source, packing)
    manifest = pack_rows(store, source, Packing(length=LENGTH, length_column="wrong"))
    with pytest.raises(StoreError, match="have other lengths than 'wrong' said"):
        read_columns(store, manifest)
    manifest = pack_rows(store, source, Packing(length=32, length_column="at_most_32"))
    with pytest.raises(InvalidInput, match="documents of more than 32 tokens"):
        read_columns(store, manifest)
    with pytest.raises(InvalidInput, match="makes a column 'position_ids': rename"):
        Packing(along={"position_ids": 0})


def test_rows_to_validate_with_are_ragged_as_those_to_train_on(tmp_path: Path) -> None:
    described = []
    for name, rows in (("a", [[1], [2, 3]]), ("b", [[4, 5], [6, 7]])):
        (tmp_path / name).mkdir()
        store = write(tmp_path / name, {"x": pa.array(rows), "pair": pa.array([[1, 2]] * 2)})
        described.append(describe_parquet(store, ["x", "pair"], transformed=True))
    first, second = described
    assert first.columns != second.columns
    aligned = align_ragged(second, first)
    assert (aligned.columns, align_ragged(first, second)) == (first.columns, first)
    assert [row.tolist() for row in read_columns(store, aligned)["x"]] == [[4, 5], [6, 7]]
