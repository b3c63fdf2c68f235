"""What columns a model's outputs become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.predictor import Outputs
from spark_elastic.estimators.torch_objects import find_activation


def outputs(widths: list[int], **names: Any) -> Outputs:
    return Outputs.of([(width,) for width in widths], **({"prediction_col": "p"} | names))


def test_one_output_has_one_column_and_several_have_labels_or_names_of_their_own() -> None:
    assert outputs([1]).columns == ("p",)
    assert outputs([1], output_cols=["y__output"]).columns == ("y__output",)
    assert outputs([1, 3], labels=["a", "b"]).columns == ("a__output", "b__output")


def test_one_loss_implies_its_activation_in_a_list_too() -> None:
    loss = torch.nn.CrossEntropyLoss()
    assert find_activation(loss) == find_activation([loss]) == "softmax"


@pytest.mark.parametrize(
    ("activation", "row", "expected"),
    [
        ("softmax", [0.0, np.log(3.0)], [0.25, 0.75]),
        ("exp", [np.log(0.5), np.log(0.5)], [0.5, 0.5]),
        ("identity", [0.75, 0.25], [0.75, 0.25]),
        ("sigmoid", [np.log(3.0)], [0.25, 0.75]),
        ("sigmoid", [-1000.0], [1.0, 0.0]),
        ("identity", [0.75], [0.25, 0.75]),
    ],
)
def test_probabilities_and_their_class(activation: str, row: list[float], expected: list[float]) -> None:
    form = outputs([len(row)], probability_col="q", activation=activation)
    assert (form.columns, form.widths) == (("p", "q"), (1, 2))
    classes, probabilities = form.values([np.array([row])])
    np.testing.assert_allclose(probabilities, [expected], atol=1e-12)
    assert classes.tolist() == [[float(np.argmax(expected))]]


@pytest.mark.parametrize(
    ("activation", "row", "raw"),
    [
        ("softmax", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ("sigmoid", [2.0], [-2.0, 2.0]),
        ("identity", [0.75], [0.25, 0.75]),
    ],
)
def test_raw_predictions_order_rows_as_sparks_evaluators_expect(
    activation: str, row: list[float], raw: list[float]
) -> None:
    form = outputs([len(row)], probability_col="q", raw_prediction_col="r", activation=activation)
    assert (form.columns, form.widths) == (("p", "q", "r"), (1, len(raw), len(raw)))
    assert form.values([np.array([row])])[2].tolist() == [raw]


@pytest.mark.parametrize(("activation", "width"), [("softmax", 3), ("sigmoid", 1)])
def test_a_row_whose_output_is_nan_has_no_class(activation: str, width: int) -> None:
    form = outputs([width], probability_col="q", activation=activation)
    classes, probabilities = form.values([np.array([[np.nan] * width, [1.0] * width])])
    assert np.isnan(classes[:, 0]).tolist() == [True, False]
    assert np.isnan(probabilities).all(axis=1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("widths", "names", "sentence"),
    [
        ([1, 1], {"output_cols": ["a"]}, "2 outputs: name as many columns"),
        ([1, 1], {"probability_col": "q", "activation": "sigmoid"}, "a model of one output"),
        ([2], {"probability_col": "q"}, "needs activation, one of softmax"),
        ([1], {"probability_col": "q", "activation": "softmax"}, "softmax makes no class probabilities of 1"),
        ([2], {"probability_col": "q", "activation": "sigmoid"}, "sigmoid makes no class probabilities of 2"),
    ],
)
def test_columns_that_do_not_fit_the_model_are_refused(
    widths: list[int], names: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        outputs(widths, **names)


@pytest.mark.parametrize("shape", [(2, 4), (3, 1, 2)])
def test_classes_at_several_places_of_a_row_have_no_probability_column(shape: tuple[int, ...]) -> None:
    """A softmax over all of a row's numbers would mix classes and places."""
    names: dict[str, Any] = {"probability_col": "q", "activation": "softmax"}
    with pytest.raises(InvalidInput, match=rf"one number for each class; this model returns \({shape[0]}, "):
        Outputs.of([shape], "p", **names)
    assert Outputs.of([(1, 4, 1)], "p", **names).widths == (1, 4)
    assert Outputs.of([shape], "p").widths == (np.prod(shape),)
