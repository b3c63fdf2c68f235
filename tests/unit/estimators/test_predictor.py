"""Columns in, predictions out: as the module itself says, whatever the columns' form."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.persistence import pack
from spark_elastic.estimators.predictor import Predictor, Transformed
from spark_elastic.estimators.stacking import ROWS_AT_ONCE


def linear(width: int, inputs: int = 3) -> tuple[torch.nn.Module, Predictor]:
    model = torch.nn.Linear(inputs, width)
    return model, Predictor(pack(model), (Column("x", "float32", (inputs,)),))


@pytest.mark.parametrize("rows", [0, 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_every_row_is_predicted_in_order(rows: int) -> None:
    model, predictor = linear(2)
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    (got,) = predictor.predict([list(x)])
    expected = model(torch.from_numpy(x)).detach().numpy()
    assert len(got) == rows
    if rows:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_the_width_is_known_without_data() -> None:
    assert [linear(n)[1].widths() for n in (1, 4)] == [[1], [4]]


def test_dropout_is_off() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.9)).train()
    predictor = Predictor(pack(model), (Column("x", "float32", (4,)),))
    assert predictor.predict([[np.ones(4)]])[0].tolist() == [[1.0] * 4]


def test_shapes_and_numbers_reach_forward_as_in_training() -> None:
    class Seen(torch.nn.Module):
        def forward(self, image: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            assert image.shape[1:] == (1, 2, 2)
            assert image.dtype == torch.float32
            assert number.dtype == torch.int64
            assert number.dim() == 1
            return image.sum((1, 2, 3)) + number

    columns = (Column("image", "float32", (1, 2, 2)), Column("number", "int64", ()))
    predictor = Predictor(pack(Seen()), columns)
    nested = np.array([np.array([1.0, 2.0]), np.array([3.0, 4.0])], dtype=object)
    assert predictor.predict([[[1, 2, 3, 4], nested], [5, 6]])[0].tolist() == [[15.0], [16.0]]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([[1.0, 2.0, 3.0], None], "'x' has nulls"),
        ([[1.0, 2.0]], "'x' has a row of 2 numbers; .* trained on 3"),
    ],
)
def test_rows_that_do_not_fit_are_named(rows: list[Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        linear(1)[1].predict([rows])


def test_a_null_among_whole_numbers_is_named() -> None:
    predictor = Predictor(pack(torch.nn.Identity()), (Column("n", "int64", ()),))
    with pytest.raises(InvalidInput, match="'n' has nulls"):
        predictor.predict([np.array([1.0, np.nan])])


def test_several_outputs_are_several_arrays() -> None:
    class Pair(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sum(1), x

    predictor = Predictor(pack(Pair()), (Column("x", "float32", (3,)),))
    assert predictor.widths() == [1, 3]
    assert [part.tolist() for part in predictor.predict([[[1.0, 2.0, 3.0]]])] == [[[6.0]], [[1.0, 2.0, 3.0]]]


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Words(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> str:
            return "x"

    with pytest.raises(InvalidInput, match="returns str"):
        Predictor(pack(Words()), (Column("x", "float32", (3,)),)).widths()


def test_a_loaded_module_does_not_travel() -> None:
    _, predictor = linear(1, inputs=1000)
    size = len(pickle.dumps(predictor))
    predictor.widths()
    assert len(pickle.dumps(predictor)) == size


def brightness(columns: dict[str, Any]) -> dict[str, Any]:
    """One number of a picture's bytes, and of a day."""
    assert columns["day"].dtype == np.dtype("datetime64[D]")
    x = np.array([sum(image) for image in columns["image"]], dtype="float32")[:, None]
    return {"image": x, "day": columns["day"].astype("int64").astype("float32")[:, None]}


def test_a_transformation_makes_the_inputs() -> None:
    module = torch.nn.Bilinear(1, 1, 1)
    columns = (Column("image", "object"), Column("day", "datetime64[D]"))
    predictor = pickle.loads(pickle.dumps(Predictor(pack(Transformed(module, brightness), module), columns)))
    images, days = [b"ab", b"", b"z"], [3, 1, 2]
    made = brightness({"image": images, "day": np.array(days).astype("datetime64[D]")})
    expected = module(torch.from_numpy(made["image"]), torch.from_numpy(made["day"])).detach().numpy()
    np.testing.assert_allclose(predictor.predict([images, days])[0], expected, rtol=1e-6)
    assert predictor.needs_sample
    assert predictor.widths([images[:1], days[:1]]) == [1]
    assert type(predictor.model()) is torch.nn.Bilinear
    with pytest.raises(InvalidInput, match="'image' has nulls"):
        predictor.predict([[b"a", None], [1, 2]])
    with pytest.raises(InvalidInput, match="'day' has nulls"):
        predictor.predict([[b"a", b"b"], [1.0, float("nan")]])
