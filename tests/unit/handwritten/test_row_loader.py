"""`Rows` in `ElasticDataLoader` and as a data set of torch: the same rows in each step, however they are read."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spark_elastic import Packing, Ragged, Rows
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.handwritten.torch_state import ElasticDataLoader
from tests.unit.handwritten.loaders import be_each_rank, enter_world, list_shares

COUNT, BATCH = 1000, 64


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_world(monkeypatch)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Three files with small row groups."""
    folder = tmp_path_factory.mktemp("rows")
    for number, ids in enumerate(np.array_split(np.arange(COUNT), 3)):
        table = {
            "id": ids,
            "x": pa.FixedSizeListArray.from_arrays(np.repeat(ids, 2).astype(np.float32), 2),
            "held_out": ids % 10 == 0,
            "text": [f"row {row}" for row in ids],
        }
        pq.write_table(pa.table(table), folder / f"{number}.parquet", row_group_size=70)
    return Rows.from_parquet(folder)


def read_ids(loader: ElasticDataLoader, name: str = "id") -> list[list[int]]:
    return [batch[name].tolist() for batch in loader]


def flatten(parts: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def read_steps(
    make: Callable[[], ElasticDataLoader], size: int, epochs: int = 1, name: str = "id"
) -> list[list[int]]:
    """The numbers of each step, of all ranks one after the other."""
    loaders = (make() for _ in be_each_rank(size))
    ranks = [flatten(read_ids(loader, name) for _ in range(epochs)) for loader in loaders]
    return [flatten(parts) for parts in zip(*ranks, strict=True)]


READINGS: dict[str, Callable[[Rows], ElasticDataLoader]] = {
    "by threads": lambda rows: ElasticDataLoader(rows, BATCH, seed=3),
    "by worker processes": lambda rows: ElasticDataLoader(rows.select("id"), BATCH, seed=3, num_workers=1),
    "as a data set": lambda rows: ElasticDataLoader(rows.dataset(), BATCH, seed=3),
}


def test_p1_p2_each_row_once_per_epoch_in_the_same_steps_for_any_world_and_reading(rows: Rows) -> None:
    expected = read_steps(lambda: READINGS["by threads"](rows), 1, epochs=3)
    for epoch in range(3):
        steps = expected[epoch * 16 : (epoch + 1) * 16]
        assert sorted(flatten(steps)) == list(range(COUNT))
        assert {len(step) for step in steps} == {62, 63}
    assert expected[:16] != expected[16:32]
    for size in (2, 3, 8):
        assert read_steps(lambda: READINGS["by threads"](rows), size, epochs=3) == expected
    assert read_steps(lambda: READINGS["as a data set"](rows), 3, epochs=2) == expected[:32]
    assert read_steps(lambda: READINGS["by worker processes"](rows), 2) == expected[:16]


def test_a_position_continues_in_another_world_and_belongs_to_its_rows(rows: Rows) -> None:
    expected = read_steps(lambda: READINGS["by threads"](rows), 1, epochs=2)
    loader = READINGS["by threads"](rows)
    taken = [batch["id"].tolist() for batch, _ in zip(loader, range(5), strict=False)]
    assert taken == expected[: len(taken)]
    position = loader.state_dict()

    def resume() -> ElasticDataLoader:
        other = ElasticDataLoader(rows, BATCH, seed=3)
        other.load_state_dict(position)
        return other

    assert read_steps(resume, 3, epochs=2) == expected[position["step"] :]
    for another in (rows.limit(999), rows.select("id"), rows.split(0.5)[0]):
        with pytest.raises(InvalidInput, match="position belongs to"):
            ElasticDataLoader(another, BATCH, seed=3).load_state_dict(position)


def collect_noise(rows: Rows, function: Any, size: int, **options: Any) -> dict[int, float]:
    """What the function draws for each row, in a world of that size."""
    noise: dict[int, float] = {}
    for _ in be_each_rank(size):
        for made in ElasticDataLoader(rows, BATCH, transformation_fn=function, **options):
            noise.update(zip(made["id"].tolist(), made["noise"].tolist(), strict=True))
    return noise


def test_batches_are_tensors_or_what_functions_make_of_columns_and_rows(rows: Rows) -> None:
    batch = next(iter(ElasticDataLoader(rows, BATCH, shuffle=False)))
    assert batch["x"].shape == (63, 2)
    assert batch["x"].dtype == torch.float32
    assert batch["text"] == [f"row {row}" for row in batch["id"].tolist()]
    assert batch["held_out"].dtype == torch.bool

    def double(columns: dict[str, Any], rng: Any) -> dict[str, Any]:
        assert np.array_equal(columns["x"][:, 0], columns["id"])
        return {"id": columns["id"], "noise": rng.uniform()}

    collect = partial(collect_noise, rows, double)
    assert collect(1) == collect(3) == collect(2, num_workers=1)
    assert len(set(collect(1).values())) == COUNT
    collate = lambda items: [item["text"] for item in items]  # noqa: E731
    collated = ElasticDataLoader(rows.dataset(), BATCH, collate_fn=collate)
    assert sorted(flatten(collated)) == sorted(f"row {row}" for row in range(COUNT))


def draw_for_rows(columns: dict[str, Any]) -> dict[str, Any]:
    """Draws from the generators of the process, as functions of others do."""
    return {"id": columns["id"], "noise": np.array([random.random() for _ in columns["id"]])}


def test_what_a_function_draws_from_the_process_is_the_rows_own(rows: Rows) -> None:
    collect = partial(collect_noise, rows, draw_for_rows, determinism="rows")
    assert collect(1) == collect(4)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_virtual_shares_do_not_depend_on_the_world(rows: Rows, options: dict[str, Any]) -> None:
    made = partial(ElasticDataLoader, rows.select("id"), BATCH, determinism="bitwise", **options)
    make = partial(made, transformation_fn=draw_for_rows)

    def describe(batch: Any, weight: float) -> list[Any]:
        return [batch["id"].tolist(), batch["noise"].tolist(), weight]

    alone = list_shares(make, 1, describe, epochs=2)
    assert [len(shares) for shares in alone] == [8] * 32
    assert sorted(flatten(share[0] for step in alone[:16] for share in step)) == list(range(COUNT))
    assert list_shares(make, 3, describe, epochs=2) == alone


def test_a_data_set_of_rows_is_one_of_torch(rows: Rows) -> None:
    dataset = pickle.loads(pickle.dumps(rows.dataset()))
    assert len(dataset) == COUNT
    assert dataset[-1]["id"] == dataset[COUNT - 1]["id"] == COUNT - 1
    assert [item["text"] for item in dataset.__getitems__([5, 990, 5])] == ["row 5", "row 990", "row 5"]
    with pytest.raises(IndexError, match="there is no row 1000"):
        dataset[COUNT]
    ids: list[int] = []
    forked = multiprocessing.get_context("fork")
    how: Any = {"num_workers": 1, "multiprocessing_context": forked}
    for batch in torch.utils.data.DataLoader(dataset, 50, shuffle=True, **how):
        ids += batch["id"].tolist()
    assert sorted(ids) == list(range(COUNT))


def test_parts_of_rows_are_those_that_were_asked_for(rows: Rows, tmp_path: Path) -> None:
    trained, held_out = rows.split("held_out")
    assert held_out.count == COUNT // 10
    assert [column.name for column in trained.columns] == ["id", "x", "text"]
    assert sorted(flatten(read_ids(ElasticDataLoader(held_out, 7)))) == list(range(0, COUNT, 10))
    first, second = trained.limit(500).split(0.25, seed=4)
    assert first.count + second.count == 500
    assert 80 < second.count < 170
    both = [flatten(read_ids(ElasticDataLoader(part, 7))) for part in (first, second)]
    assert sorted(both[0] + both[1]) == [row for row in range(COUNT) if row % 10][:500]
    second.save(str(tmp_path / "held-out.json"))
    again = Rows.open(str(tmp_path / "held-out.json"))
    assert again == second
    told = f"{second.count} rows of Parquet files in {rows.store.url} (split by held_out)"
    assert again.describe().startswith(told)
    assert ElasticDataLoader(rows, 300, drop_last=True).__len__() == 3


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Documents of 1 to 40 tokens; each token tells its document and its place."""
    folder, draw = tmp_path_factory.mktemp("documents"), np.random.default_rng(2)
    tokens = [100 * number + np.arange(draw.integers(1, 41)) for number in range(600)]
    for part in range(2):
        table = pa.table({"input_ids": [list(each) for each in tokens[part::2]]})
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=40)
    return Rows.from_parquet(folder)


def test_ragged_rows_are_padded_or_nested_and_collated(documents: Rows) -> None:
    assert documents.describe().endswith("input_ids: arrays of int64 of different lengths")
    for batch in ElasticDataLoader(documents, 50):
        rows = batch["input_ids"]
        padded = rows.pad(-1)
        assert padded.shape == (len(rows), int(rows.lengths.max()))
        assert [row[row >= 0].tolist() for row in padded] == [row.tolist() for row in rows]
        assert rows.nested().size(0) == len(rows)
    item = documents.dataset()[7]["input_ids"]
    assert item.tolist() == (100 * (int(item[0]) // 100) + torch.arange(len(item))).tolist()


def test_transformations_may_return_ragged_rows_and_strings_stay(documents: Rows, tmp_path: Path) -> None:
    def cut(columns: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": Ragged.of(columns["input_ids"], max_length=4, dtype="int64")}

    for determinism in (None, "rows"):
        for batch in ElasticDataLoader(documents, 50, transformation_fn=cut, determinism=determinism):
            assert batch["input_ids"].pad(0).dtype == torch.int64
            assert int(batch["input_ids"].lengths.max()) == 4
    words = pa.array([["a", "b"], ["c"]])
    pq.write_table(pa.table({"words": words}), tmp_path / "words.parquet")
    (batch,) = ElasticDataLoader(Rows.from_parquet(tmp_path), 2, shuffle=False)
    assert [row.tolist() for row in batch["words"]] == words.to_pylist()


def test_p1_p2_packed_documents_give_the_same_stream_of_tokens_to_any_world(
    documents: Rows, tmp_path: Path
) -> None:
    rows = documents.pack(Packing(length=64))
    assert rows.describe().startswith(f"{rows.count} rows of Parquet files in ")

    def read(size: int, skip: int = 0) -> list[list[int]]:
        def make() -> ElasticDataLoader:
            loader = ElasticDataLoader(rows, 16, seed=1)
            loader.step = skip
            return loader

        return read_steps(make, size, epochs=2, name="input_ids")

    expected = read(1)
    for size in (2, 3, 8):
        assert read(size) == expected
    assert read(5, skip=4) == expected[4:]
    (batch,) = ElasticDataLoader(rows, rows.count)
    used = batch["document_ids"] > 0
    total = sum(len(item["input_ids"]) for item in documents.dataset().__getitems__(list(range(600))))
    assert int(used.sum()) == total == len(set(batch["input_ids"][used].tolist()))
    assert total / used.numel() > 0.9
    rows.save(str(tmp_path / "packed.json"))
    assert Rows.open(str(tmp_path / "packed.json")) == rows


BAD: list[tuple[Callable[[Rows], Any], str]] = [
    (lambda rows: rows.select("idd"), "no column 'idd'"),
    (lambda rows: rows.split("texts"), r"has no column 'texts'; .* \(did you mean 'text'\?\)"),
    (lambda rows: rows.split("text"), "'text' has bytes or strings"),
    (lambda rows: rows.split(2.0), "a fraction between 0 and 1"),
    (lambda rows: rows.limit(5).split(1e-9), "leaves none of 5 rows to hold out"),
    (lambda rows: rows.limit(0), "count must be a whole number of 1 or more"),
    (lambda rows: Rows.from_parquet([]), "paths is empty"),
    (lambda rows: Rows.from_parquet(rows.store.root, columns="id"), "must be a list of names"),
    (lambda rows: rows.pack(Packing(column="id")), "column 'id' has no arrays of numbers"),
    (lambda rows: ElasticDataLoader(rows, 8, lanes=9), "lanes=9 is more than the 8 rows"),
    (lambda rows: ElasticDataLoader(rows, 2000, drop_last=True), "drop_last leaves nothing of 1000 rows"),
    (lambda rows: ElasticDataLoader([1, 2], 1, transformation_fn=abs), "goes with Rows, not with a list"),
    (lambda rows: ElasticDataLoader(rows, 8, transformation_fn=3), "transformation_fn must be a function"),
]


@pytest.mark.parametrize(("make", "says"), BAD)
def test_a_mistake_is_one_sentence(rows: Rows, make: Callable[[Rows], Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        make(rows)


def test_files_that_are_gone_or_changed_are_named(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0]}), path)
    rows = Rows.from_parquet(tmp_path)
    pq.write_table(pa.table({"x": [3.0, 4.0, 5.0]}), path)
    with pytest.raises(StoreError, match=r"'0\.parquet' .*"):
        list(ElasticDataLoader(rows, 1))
    path.unlink()
    with pytest.raises(StoreError, match=r"'0\.parquet'"):
        rows.dataset()[0]
    (tmp_path / "rows.json").write_text("{}")
    with pytest.raises(StoreError, match=r"is not what Rows\.save writes"):
        Rows.open(str(tmp_path / "rows.json"))
