"""What columns a model's outputs become."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.outputs import OutputColumns, Outputs
from spark_elastic.estimators.torch_objects import find_activation

DEFAULTS: dict[str, Any] = {
    "prediction_col": "prediction",
    "probability_col": "probability",
    "raw_prediction_col": "rawPrediction",
    "threshold": 0.5,
    "thresholds": None,
    "activation": None,
    "raw_outputs": False,
    "output_cols": None,
    "label_cols": [],
}
THREE = ("rawPrediction", "probability", "prediction")


def outputs(shapes: list[Any], implied: str | None = None, **given: Any) -> Outputs:
    """shapes: of a row of each output, or its width."""
    wanted = OutputColumns.from_params(DEFAULTS | given, given, implied)
    return Outputs.of([(each,) if isinstance(each, int) else each for each in shapes], wanted)


def test_one_output_has_one_column_and_several_have_labels_or_names_of_their_own() -> None:
    assert outputs([1]).columns == ("prediction",)
    assert outputs([1], output_cols=["y__output"]).columns == ("y__output",)
    assert outputs([1, 3], label_cols=["a", "b"]).columns == ("a__output", "b__output")


class Focal(torch.nn.CrossEntropyLoss):
    """A loss of classes of the user's."""


@pytest.mark.parametrize(
    ("loss", "activation"),
    [
        (torch.nn.CrossEntropyLoss(), "softmax"),
        ([torch.nn.CrossEntropyLoss()], "softmax"),
        (partial(F.cross_entropy, label_smoothing=0.1), "softmax"),
        (Focal(), "softmax"),
        (torch.nn.NLLLoss(), "exp"),
        (F.nll_loss, "exp"),
        (torch.nn.BCELoss(), "probability"),
        (F.binary_cross_entropy, "probability"),
        (torch.nn.BCEWithLogitsLoss(), "sigmoid"),
        (F.binary_cross_entropy_with_logits, "sigmoid"),
        (torch.nn.MultiMarginLoss(), "softmax"),
        (F.multi_margin_loss, "softmax"),
        (torch.nn.MSELoss(), None),
        (lambda output, label: F.cross_entropy(output, label), None),  # noqa: PLW0108 - the user's own
        ([torch.nn.CrossEntropyLoss(), torch.nn.MSELoss()], None),
        (None, None),
    ],
)
def test_the_loss_says_whether_outputs_are_classes(loss: Any, activation: str | None) -> None:
    assert find_activation(loss) == activation


@pytest.mark.parametrize(
    ("activation", "row", "probabilities", "raw"),
    [
        ("softmax", [0.0, np.log(3.0)], [0.25, 0.75], [-np.log(3.0), np.log(3.0)]),
        ("softmax", [1.0, 1.0, 1.0], [1 / 3, 1 / 3, 1 / 3], [1.0, 1.0, 1.0]),
        ("exp", [np.log(0.25), np.log(0.75)], [0.25, 0.75], [-np.log(3.0), np.log(3.0)]),
        ("identity", [0.75, 0.25], [0.75, 0.25], [0.75, 0.25]),
        ("identity", [0.75], [0.25, 0.75], [0.25, 0.75]),
        ("probability", [0.75], [0.25, 0.75], [0.25, 0.75]),
        ("sigmoid", [np.log(3.0)], [0.25, 0.75], [-np.log(3.0), np.log(3.0)]),
        ("sigmoid", [-1000.0], [1.0, 0.0], [1000.0, -1000.0]),
    ],
)
def test_classes_have_the_three_columns_of_sparks_classifiers(
    activation: str, row: list[float], probabilities: list[float], raw: list[float]
) -> None:
    form = outputs([len(row)], activation)
    assert form == outputs([(1, len(row), 1)], activation=activation)
    assert (form.columns, form.widths) == (THREE, (len(raw), len(raw), 1))
    found = form.values([np.array([row])])
    np.testing.assert_allclose(found[0], [raw])
    np.testing.assert_allclose(found[1], [probabilities], atol=1e-12)
    assert found[2].tolist() == [[float(np.argmax(probabilities))]]
    for name in (None, ""):  # as Spark's own leave a column out
        some = outputs([len(row)], activation, probability_col=name, raw_prediction_col=name)
        assert some.columns == ("prediction",)
        assert [each.tolist() for each in some.values([np.array([row])])] == [found[2].tolist()]


@pytest.mark.parametrize(
    ("given", "probabilities", "classes"),
    [
        ({}, [[0.5, 0.5], [0.4, 0.6]], [0, 1]),
        ({"threshold": 0.7}, [[0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], [1, 0, 0]),
        ({"thresholds": [3, 7]}, [[0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], [1, 0, 0]),
        ({"thresholds": [0.5, 0.0]}, [[1.0, 0.0], [0.9, 0.1]], [0, 1]),
        ({"thresholds": [1.0, 2.0, 0.5]}, [[0.3, 0.5, 0.2], [0.3, 0.59, 0.11]], [2, 0]),
        ({"thresholds": [1.0, 0.0, 1.0]}, [[0.6, 0.1, 0.3], [0.3, 0.0, 0.7]], [1, 2]),
        ({"thresholds": [0.3, 0.7], "threshold": 0.7}, [[0.2, 0.8]], [1]),
    ],
)
def test_thresholds_choose(given: dict[str, Any], probabilities: list[Any], classes: list[int]) -> None:
    rows = np.array(probabilities)
    assert outputs([rows.shape[1]], "identity", **given).values([rows])[2][:, 0].tolist() == classes


@pytest.mark.parametrize(
    ("shapes", "implied"),
    [
        ([3], "probability"),  # labels that do not exclude each other
        ([3], "sigmoid"),
        ([1], "softmax"),
        ([(2, 4)], "softmax"),  # a class for each token
        ([2, 1], "softmax"),
    ],
)
def test_what_cannot_be_a_class_stays_unless_classes_were_asked_for(shapes: list[Any], implied: str) -> None:
    form = outputs(shapes, implied, label_cols=["a", "b"])
    assert form.activation is None
    assert form == outputs(shapes, None, label_cols=["a", "b"])
    with pytest.raises(InvalidInput, match="set raw_outputs=True, for the outputs as they are"):
        outputs(shapes, implied, probability_col="q")


def test_raw_outputs_are_asked_for_and_named() -> None:
    assert outputs([3], "softmax", raw_outputs=True).columns == ("prediction",)
    assert outputs([3], "softmax", output_cols=["scores"]).columns == ("scores",)
    assert outputs([3], activation="softmax", raw_outputs=True).activation is None


@pytest.mark.parametrize(
    ("shapes", "given", "sentence"),
    [
        ([1, 1], {"output_cols": ["a"]}, "2 outputs: name as many columns"),
        ([1, 1], {"probability_col": "q", "activation": "sigmoid"}, "the model has 2: let transform"),
        ([2], {"probability_col": "q"}, "probability_col needs activation, one of softmax"),
        ([2], {"thresholds": [1, 1]}, "thresholds needs activation"),
        ([1], {"activation": "softmax"}, "softmax makes no class probabilities of 1"),
        ([2], {"activation": "sigmoid"}, "sigmoid makes no class probabilities of 2"),
        ([(2, 4)], {"activation": "softmax"}, r"one number each, and the model returns \(2, 4\) a row"),
        ([3], {"activation": "softmax", "thresholds": [1, 2]}, "2 numbers and the model 3 classes"),
        ([3], {"activation": "softmax", "threshold": 0.3}, "the model has 3: give thresholds"),
        ([2], {"activation": "softmx"}, "activation must be one of 'softmax', 'exp'"),
        ([2], {"prediction_col": ""}, "prediction_col, .* must be names; got ''"),
        ([2], {"probability_col": ["p"]}, "must be names; got .'p'"),
        ([2], {"prediction_col": "x", "feature_cols": ["x"]}, "'x' is a feature column, and transform is to"),
        ([2], {"output_cols": [1]}, "must be names; got 1"),
        ([2], {"probability_col": "p", "output_cols": ["q"]}, "of classes, and output_cols asks for"),
        ([2], {"threshold": 0.1, "raw_outputs": True}, "threshold is of classes, and raw_outputs asks for"),
        ([2], {"raw_outputs": 1}, "raw_outputs must be True or False"),
        ([2], {"threshold": 1.5, "activation": "softmax"}, "must be a number from 0 to 1, .* got 1.5"),
        ([2], {"thresholds": [0, 0], "activation": "softmax"}, "at most one 0; got .0, 0."),
        ([2], {"thresholds": 0.5, "activation": "softmax"}, "thresholds a list of one number"),
        ([2], {"thresholds": [1, 1], "threshold": 0.7, "activation": "softmax"}, "say different things"),
    ],
)
def test_columns_that_do_not_fit_are_refused(shapes: list[Any], given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        outputs(shapes, **given)
