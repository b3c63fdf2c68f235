"""Columns in, predictions out: as the module itself says, whatever the columns' form."""

from __future__ import annotations

import datetime as dt
import pickle
from dataclasses import replace
from decimal import Decimal as D
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.data.transformation import transform_columns
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.predictor import (
    ROWS_AT_ONCE,
    ModuleWithTransformation,
    TorchPredictor,
    choose_gpu,
    stack_rows,
)
from spark_elastic.estimators.saving import pack
from spark_elastic.estimators.torch_objects import check_torch_objects
from spark_elastic.estimators.validation import build_request
from spark_elastic.training.torch.spec import BatchBuilder
from tests.unit.estimators.requests import values


class Returns(torch.nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.returns = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.returns(x)


def linear(width: int, inputs: int = 3) -> tuple[torch.nn.Module, TorchPredictor]:
    model = torch.nn.Linear(inputs, width)
    return model, TorchPredictor(pack(model), (Column("x", "float32", (inputs,)),))


@pytest.mark.parametrize("rows", [0, 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_every_row_is_predicted_in_order(rows: int) -> None:
    model, predictor = linear(2)
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    (got,) = predictor.predict([list(x)])
    expected = model(torch.from_numpy(x)).detach().numpy()
    assert len(got) == rows
    if rows:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE + 1])
def test_a_single_row_may_be_returned_without_its_dimension(rows: int) -> None:
    """As `squeeze()` does with a last part of one row."""
    squeezes = Returns(lambda x: x.sum(1, keepdim=True).squeeze())
    predictor = TorchPredictor(pack(squeezes), (Column("x", "float32", (2,)),))
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    assert predictor.shapes() == [()]
    assert predictor.predict([list(x)])[0].tolist() == x.sum(1, keepdims=True).tolist()


def test_dropout_is_off() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.9)).train()
    predictor = TorchPredictor(pack(model), (Column("x", "float32", (4,)),))
    assert predictor.predict([[np.ones(4)]])[0].tolist() == [[1.0] * 4]


def test_shapes_and_numbers_reach_forward_as_in_training() -> None:
    class ShapeCheckingNet(torch.nn.Module):
        def forward(self, image: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            assert image.shape[1:] == (1, 2, 2)
            assert image.dtype == torch.float32
            assert number.dtype == torch.int64
            assert number.dim() == 1
            return image.sum((1, 2, 3)) + number

    columns = (Column("image", "float32", (1, 2, 2)), Column("number", "int64", ()))
    predictor = TorchPredictor(pack(ShapeCheckingNet()), columns)
    nested = np.array([np.array([1.0, 2.0]), np.array([3.0, 4.0])], dtype=object)
    assert predictor.predict([[[1, 2, 3, 4], nested], [5, 6]])[0].tolist() == [[15.0], [16.0]]


def test_columns_come_in_the_precision_of_what_is_trained() -> None:
    """A 16-bit backbone stands still before it."""

    class FineTunedNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
            self.head = torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x * self.backbone)

    model, x = FineTunedNet(), np.array([[1000.3, 2.0, 3.0]], np.float32)
    (found,) = TorchPredictor(pack(model), (Column("x", "float32", (3,)),)).predict([list(x)])
    assert found.tolist() == model(torch.from_numpy(x)).tolist()


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda x: (x.sum(1), x), [[[3.0]], [[1.0, 2.0]]]),
        (lambda x: [x.sum(1), x], [[[3.0]], [[1.0, 2.0]]]),
        (lambda x: {"a": x.sum(1), "b": x}, [[[3.0]], [[1.0, 2.0]]]),
        (lambda x: {"logits": x * 2, "cache": object()}, [[[2.0, 4.0]]]),
    ],
)
def test_several_outputs_are_several_arrays(forward: Any, found: list[Any]) -> None:
    predictor = TorchPredictor(pack(Returns(forward)), (Column("x", "float32", (2,)),))
    assert [part.tolist() for part in predictor.predict([[[1.0, 2.0]]])] == found
    assert predictor.shapes() == ([(), (2,)] if len(found) == 2 else [(2,)])


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidInput, match="returns str"):
        TorchPredictor(pack(Returns(lambda x: "x")), (Column("x", "float32", (3,)),)).shapes()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_output_whose_rows_are_in_another_dimension_is_refused(layers: int) -> None:
    """A GRU's hidden state: of as many layers as rows it looks right."""
    model = torch.nn.GRU(2, 3, num_layers=layers, batch_first=True)
    predictor = TorchPredictor(pack(model), (Column("x", "float32", (5, 2)),))
    says = rf"this model returns \({layers}, (\d), 3\) for \1 rows"
    with pytest.raises(InvalidInput, match=says):
        predictor.shapes()
    with pytest.raises(InvalidInput, match=says):
        predictor.shapes([[np.ones((5, 2))]])
    with pytest.raises(InvalidInput, match=says):
        predictor.predict([np.ones((4, 5, 2))])


def test_the_loaded_module_is_not_pickled_with_its_predictor() -> None:
    _, predictor = linear(1, inputs=1000)
    size = len(pickle.dumps(predictor))
    predictor.shapes()
    assert len(pickle.dumps(predictor)) == size


def compute_brightness(columns: dict[str, Any]) -> dict[str, Any]:
    """One number of a picture's bytes, and of a day."""
    assert columns["day"].dtype == np.dtype("datetime64[D]")
    x = np.array([sum(image) for image in columns["image"]], dtype="float32")[:, None]
    return {"image": x, "day": columns["day"].astype("int64").astype("float32")[:, None]}


def test_a_transformation_makes_the_inputs() -> None:
    module = torch.nn.Bilinear(1, 1, 1)
    columns = (Column("image", "object"), Column("day", "datetime64[D]"))
    packed = pack(ModuleWithTransformation(module, compute_brightness), module)
    predictor = pickle.loads(pickle.dumps(TorchPredictor(packed, columns)))
    images, days = [b"ab", b"", b"z"], [3, 1, 2]
    made = compute_brightness({"image": images, "day": np.array(days).astype("datetime64[D]")})
    expected = module(torch.from_numpy(made["image"]), torch.from_numpy(made["day"])).detach().numpy()
    np.testing.assert_allclose(predictor.predict([images, days])[0], expected, rtol=1e-6)
    assert predictor.needs_sample
    assert predictor.shapes([images[:1], days[:1]]) == [(1,)]
    assert type(predictor.model()) is torch.nn.Bilinear
    with pytest.raises(InvalidInput, match="'image' has nulls"):
        predictor.predict([[b"a", None], [1, 2]])
    with pytest.raises(InvalidInput, match="'day' has nulls"):
        predictor.predict([[b"a", b"b"], [1.0, float("nan")]])


def test_a_function_is_given_the_same_in_training_and_for_predictions_and_its_result_is_reshaped() -> None:
    def centre(columns: dict[str, Any]) -> dict[str, Any]:
        assert columns["x"].shape == (2, 4)
        return {**columns, "x": columns["x"] - columns["x"].mean(1, keepdims=True)}

    wanted = build_request(values(transformation_fn=centre, input_shapes=[(1, 2, 2)]), check_torch_objects)
    change, stored = wanted.objects.transformation, (Column("x", "float32", (4,)),)
    x, y = np.arange(8, dtype=np.float32).reshape(2, 4) ** 2, np.zeros(2, np.float32)
    rows = StepRows(0, 0, 2, np.arange(2), {"x": x, "y": y})
    rows = replace(rows, columns=transform_columns(rows.columns, 2, ["x", "y"], change))
    seen = BatchBuilder(stored, ("y",), None, torch.float32, reshapes=False).build(rows).features[0]
    assert seen.shape == (2, 1, 2, 2)
    module = torch.nn.Flatten()
    packed = pack(ModuleWithTransformation(module, change), module)
    (predicted,) = TorchPredictor(packed, stored).predict([list(x)])
    assert predicted.tolist() == module(seen).tolist()
    wrong = build_request(values(transformation_fn=centre, input_shapes=[(3, 1)]), check_torch_objects)
    with pytest.raises(InvalidInput, match=r"input_shapes says \(3, 1\) for column 'x', of which"):
        wrong.objects.transformation({"x": x, "y": y})


@pytest.mark.parametrize(
    ("dtype", "shape", "rows", "says"),
    [
        ("float32", (3,), [[1.0, 2.0, 3.0], None], "'x' has nulls"),
        ("float32", (3,), [[1.0, 2.0]], "'x' has a row of 2 numbers; .* trained on 3"),
        ("int64", (), np.array([1.0, np.nan]), "'x' has nulls"),
        ("int32", (), np.array([1.7, 2.0]), "has 1.7; the model was trained on int32"),
        ("int32", (), [D("1.7")], "has 1.7"),
        ("int32", (2,), [np.array([1.0, 1.5])], "has 1.5"),
        ("int8", (), np.array([5, 300]), "has 300; the model was trained on int8"),
        ("uint8", (2,), [[3, -1]], "has -1"),
        ("int64", (), [1e19], "has 1e"),
        ("bool", (), [2, 0], "has 2; the model was trained on bool"),
        ("int32", (2,), [np.array([1.0, np.nan])], "has nulls"),
        ("int32", (2,), [[1, None]], "has nulls"),
        ("float32", (2, 2), [[[1.0, 2.0, 3.0], [4.0]]], "not of the lengths .* trained on .2, 2."),
        ("datetime64[us]", (), np.array(["2020-01-01", "NaT"], "datetime64[ns]"), "has nulls"),
        ("object", (2,), [["a", "b"], ["c"]], "not of the lengths"),
        ("object", (2,), [["a", None]], "has nulls"),
        ("object", (2,), [["a", "b"], float("nan")], "has nulls"),
        ("object", (), ["a", float("nan")], "has nulls"),  # as pandas 3 has a null among strings
        ("object", (), [b"a", pd.NA], "has nulls"),
        ("object", (), pa.array(["a", None]), "has nulls"),
        ("int32", (), [1, pd.NA], "has nulls"),
        ("float32", (2,), [[1.0, 2.0], pd.NA], "has nulls"),
        ("datetime64[us]", (), [pd.Timestamp(0), pd.NaT], "has nulls"),
    ],
)
def test_values_that_the_columns_type_cannot_hold_are_refused(
    dtype: str, shape: tuple[int, ...], rows: Any, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        TorchPredictor(pack(torch.nn.Identity()), (Column("x", dtype, shape),)).predict([rows])


@pytest.mark.parametrize(
    ("dtype", "shape", "rows", "found"),
    [
        ("int8", (), np.array([5, 7], "int64"), [5, 7]),
        ("float32", (), [1, 2], [1.0, 2.0]),
        ("float64", (), [D("1.5")], [1.5]),
        ("float64", (2,), [np.array([D("1.5"), D("2.5")], object)], [[1.5, 2.5]]),
        ("int64", (), [True, False], [1, 0]),
        ("datetime64[D]", (1,), [np.array([3])], [[dt.date(1970, 1, 4)]]),
        ("datetime64[us]", (), [dt.datetime(2020, 1, 1)], [dt.datetime(2020, 1, 1)]),
        ("object", (2,), [np.array(["a", "b"], object), ["c", "d"]], [["a", "b"], ["c", "d"]]),
        ("object", (1,), [[bytearray(b"a\0")]], [[b"a\0"]]),
        ("object", (2, 1), [[["a"], ["b"]]], [[["a"], ["b"]]]),
    ],
)
def test_a_transformation_gets_the_same_rows_as_in_training(
    dtype: str, shape: tuple[int, ...], rows: Any, found: Any
) -> None:
    array = stack_rows(rows, Column("x", dtype, shape))
    assert array.dtype == np.dtype(dtype)
    assert array.tolist() == found


def test_numbers_that_int64_does_not_hold_are_refused() -> None:
    predictor = TorchPredictor(pack(torch.nn.Identity()), (Column("id", "uint64"),))
    assert predictor.make_tensor(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]
    with pytest.raises(InvalidInput, match="uint64 has 9223372036854775813, and the model's whole numbers"):
        predictor.make_tensor(np.array([2**63 + 5], np.uint64))


@pytest.mark.parametrize(
    ("addresses", "visible", "number"),
    [
        ([], 0, None),
        ([], 2, None),  # Spark gave this task none
        (["1"], 0, None),
        (["1"], 4, 1),
        (["3"], 1, 0),  # the process sees its own alone
        (["GPU-5a1f"], 1, 0),
    ],
)
def test_a_task_uses_the_gpu_spark_assigned(addresses: list[str], visible: int, number: int | None) -> None:
    assert choose_gpu(addresses, visible) == number


def test_names_of_visible_gpus_count_as_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="Spark gave GPU '7' to this task, and CUDA shows 0, 1: let CUDA_"):
        choose_gpu(["7"], 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,MIG-5a1f")
    assert [choose_gpu([address], 2) for address in ("2", "MIG-5a1f", "1")] == [0, 1, 1]
