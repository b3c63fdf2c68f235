"""The user's function of columns: how it is called, what it may return, and in which parts rows come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.packing import Ragged
from spark_elastic.data.plan import DataPlan, Division
from spark_elastic.data.transformation import (
    BatchTransformation,
    RowBatch,
    RowRandom,
    reshape_results,
    transform_columns,
)
from spark_elastic.errors import InvalidInput
from spark_elastic.training.transformation_pool import cut_at_shares

Columns = dict[str, Any]


def _add_noise(columns: Columns, rng: RowRandom | None) -> Columns:
    noise = 0.0 if rng is None else rng.uniform(size=4)
    return {**columns, "x": columns["x"] + noise}


def _make_batch(rows: slice, *cuts: int, augments: bool = True) -> RowBatch:
    x = np.arange(40.0).reshape(10, 4)
    return RowBatch({"x": x[rows], "y": np.arange(10)[rows]}, np.arange(10)[rows], 2, cuts, augments)


def test_a_row_is_augmented_alike_in_any_part() -> None:
    change = BatchTransformation(_add_noise, ("x", "y"), seed=5)
    whole = change.apply(_make_batch(slice(0, 10)))
    assert not np.array_equal(whole["x"], np.arange(40.0).reshape(10, 4))
    np.testing.assert_array_equal(change.apply(_make_batch(slice(0, 10), 0, 3, 7, 10))["x"], whole["x"])
    np.testing.assert_array_equal(change.apply(_make_batch(slice(4, 8)))["x"], whole["x"][4:8])
    np.testing.assert_array_equal(change.apply(_make_batch(slice(0, 4), 0, 0, 3, 3, 4))["x"], whole["x"][:4])
    plain = change.apply(_make_batch(slice(0, 10), 0, 10, augments=False))
    np.testing.assert_array_equal(plain["x"], np.arange(40.0).reshape(10, 4))
    found = transform_columns(
        {"x": np.zeros((3, 4))},
        3,
        ["x"],
        reshape_results(_add_noise, {"x": (2, 2)}),
        RowRandom(1, 1, np.arange(3)),
    )
    assert found["x"].shape == (3, 2, 2)
    assert len(set(found["x"].ravel().tolist())) == 12


@pytest.mark.parametrize(
    ("returned", "what"), [(None, "None"), ((np.zeros(3),), "tuple"), (np.zeros(3), "ndarray")]
)
def test_what_is_no_dict_of_columns_is_refused(returned: Any, what: str) -> None:
    for change in (lambda columns: returned, reshape_results(lambda columns: returned, {"x": (2, 2)})):
        with pytest.raises(InvalidInput, match=f"^transformation_fn returned {what}: return a dict"):
            transform_columns({"x": np.zeros((3, 4))}, 3, ["x"], change)


@pytest.mark.parametrize("make", [list, Ragged.of])
def test_rows_of_different_lengths_are_refused_by_name(make: Any) -> None:
    rows = make([np.arange(3), np.arange(2)])
    for change in (lambda columns: {"x": rows}, reshape_results(lambda columns: {"x": rows}, {"x": (2,)})):
        with pytest.raises(InvalidInput, match=r"different shapes as column 'x': .*Ragged.of\(rows\).pad"):
            transform_columns({"x": np.zeros((2, 4))}, 2, ["x"], change)


def test_each_virtual_share_is_a_part() -> None:
    plan = DataPlan((100,), 10, seed=0, lanes=1, shares=4)
    group: Any = SimpleNamespace(rank=1, size=2)
    moved = StepRows(0, 0, 10, np.arange(8), {}, Division((0, 1, 4)))
    assert cut_at_shares(plan, moved, group) == (0, 3, 5, 8)
    rows = StepRows(0, 0, 10, np.arange(5), {}, Division.equal(2, 4))
    assert cut_at_shares(plan, rows, group) == (0, 2, 5)
    assert cut_at_shares(DataPlan((100,), 10, seed=0, lanes=1), rows, group) == ()


@pytest.mark.parametrize("first", range(4))
def test_a_virtual_share_has_the_same_bits_wherever_it_lies_in_memory(first: int) -> None:
    """Also where it is all that a rank has."""

    def embed(columns: Columns) -> Columns:
        x = torch.from_numpy(columns["x"])
        return {"x": torch.nn.functional.linear(x, weight).numpy()}

    numbers = torch.Generator().manual_seed(1)
    weight, x = torch.randn(3, 1001, generator=numbers), torch.randn(3, 1001, generator=numbers).numpy()
    change, ids = BatchTransformation(embed, ("x",), seed=5), np.arange(3)
    memory = np.zeros(x.size + 4, np.float32)
    placed = memory[first : first + x.size].reshape(x.shape)
    placed[...] = x
    expected = change.apply(RowBatch({"x": x}, ids, 0, (0, 3), augments=True))["x"]
    found = change.apply(RowBatch({"x": placed}, ids, 0, (0, 3), augments=True))["x"]
    assert found.tobytes() == expected.tobytes()


def _stack(columns: Columns) -> Columns:
    """As functions that decode pictures do."""
    return {**columns, "x": np.stack([row * 2 for row in columns["x"]])}


@pytest.mark.parametrize("cuts", [(), (0, 0), (0, 0, 0)])
def test_no_rows_are_not_transformed(cuts: tuple[int, ...]) -> None:
    found = BatchTransformation(_stack, ("x", "y"), seed=5).apply(_make_batch(slice(0, 0), *cuts))
    assert {name: len(column) for name, column in found.items()} == {"x": 0, "y": 0}


def test_the_shape_of_no_rows_is_found_in_training_where_a_forward_pass_needs_it() -> None:
    def halve(columns: Columns) -> Columns:
        return {**columns, "x": columns["x"][:, :2]}

    change = BatchTransformation(halve, ("x", "y"), seed=5, shapes_nothing=True)
    assert change.apply(_make_batch(slice(0, 0)))["x"].shape == (0, 2)
    assert change.apply(_make_batch(slice(0, 0), augments=False))["x"].shape == (0,)
