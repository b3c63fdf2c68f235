"""What a model's outputs become in the table that `transform` returns: classes, or the numbers as they are.

Classes come as those of Spark ML's own classifiers do: the class, the probability of each, and what these were made of.
numpy only; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.checks import FLAG, make_choice
from spark_elastic.errors import InvalidInput

Floats = npt.NDArray[np.float64]
Shape = tuple[int, ...]
# Of a number for each class, then of the one number that says how likely class 1 of two is. identity takes both.
SEVERAL, SINGLE = ("softmax", "exp"), ("sigmoid", "probability")
ACTIVATIONS = (*SEVERAL, *SINGLE, "identity")
OF_CLASSES = ("probability_col", "raw_prediction_col", "threshold", "thresholds")  # of classes alone
HALF = 0.5


@dataclass(frozen=True)
class OutputColumns:
    """The columns that the user asked for, checked as far as that goes without the model's outputs."""

    prediction: str  # column of the class, or of the model's one output
    probability: str | None  # column of a vector of probabilities; None: it is left out
    raw_prediction: str | None  # column of a vector of what these are made of; None: it is left out
    outputs: tuple[str, ...] | None  # column of each output; None: `prediction`, or by `labels`
    labels: tuple[str, ...]  # label columns of the training
    activation: str | None  # what makes probabilities of the one output; None: it stays as it is
    thresholds: tuple[float, ...]  # threshold of each class; a single one is that of class 1 of two
    required: bool  # whether classes were asked for by name; else outputs that are none stay as they are

    @classmethod
    def from_params(
        cls, values: Mapping[str, Any], named: Collection[str] = (), implied: str | None = None
    ) -> OutputColumns:
        """The parameters `values`, of which the user has set those `named`. implied: the activation, by the loss."""
        prediction, outputs = values["prediction_col"], values["output_cols"]
        probability, raw_prediction = (values[name] or None for name in OF_CLASSES[:2])
        optional = [name for name in (probability, raw_prediction) if name is not None]
        for name in (prediction, *(outputs or ()), *optional):
            if not isinstance(name, str) or not name:
                raise InvalidInput(
                    f"prediction_col, probability_col, raw_prediction_col and output_cols must be names; got {name!r}."
                )
            if name in (values.get("feature_cols") or ()):
                raise InvalidInput(
                    f"{name!r} is a feature column, and transform is to add it: choose another name for predictions."
                )
        activation = make_choice(*ACTIVATIONS).or_none()("activation", values["activation"]) or implied
        asked = [name for name in OF_CLASSES if name in named and values[name] not in (None, "")]
        if FLAG("raw_outputs", values["raw_outputs"]) or outputs is not None:
            if asked:
                other = "raw_outputs" if outputs is None else "output_cols"
                raise InvalidInput(
                    f"{asked[0]} is of classes, and {other} asks for the model's outputs as they are: leave one out."
                )
            activation = None
        elif asked and activation is None:
            raise InvalidInput(
                f"{asked[0]} needs activation, one of {', '.join(ACTIVATIONS)}: the loss does not say what makes "
                "probabilities of the model's output."
            )
        return cls(
            prediction,
            probability,
            raw_prediction,
            None if outputs is None else tuple(outputs),
            tuple(values["label_cols"] or ()),
            activation,
            _check_thresholds(values, named),
            required=bool(asked) or (values["activation"] is not None and "activation" in named),
        )

    def list_certain(self) -> tuple[str, ...]:
        """The columns that there will be whatever the model's outputs are."""
        if self.outputs is not None:
            return self.outputs
        if self.required:
            return tuple(name for name, _ in self.list_of_classes())
        return (self.prediction,) if len(self.labels) <= 1 else ()

    def list_of_classes(self) -> list[tuple[str, str]]:
        """The columns of classes and the content of each, in the order of Spark ML's classifiers."""
        contents = (self.raw_prediction, "raw"), (self.probability, "probability"), (self.prediction, "class")
        return [(name, content) for name, content in contents if name is not None]


def _check_thresholds(values: Mapping[str, Any], named: Collection[str]) -> tuple[float, ...]:
    """As `HasThresholds` of Spark ML. Raises InvalidInput for what can be none, and for two that differ."""
    single, several = values["threshold"], values["thresholds"]
    found = [single] if several is None else several
    is_usable = isinstance(found, list | tuple) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < np.inf for each in found
    )
    if not is_usable or (single > 1 if several is None else list(found).count(0) > 1):
        raise InvalidInput(
            f"threshold must be a number from 0 to 1, and thresholds a list of one number for each class, none below 0 "
            f"and at most one 0; got {single if several is None else several!r}."
        )
    thresholds = tuple(float(each) for each in found)
    is_like_single = len(thresholds) == 2 and abs(find_threshold(thresholds) - single) <= 1e-5
    if several is not None and "threshold" in named and not is_like_single:
        raise InvalidInput("threshold and thresholds say different things: give one of them.")
    return thresholds


def find_threshold(thresholds: Sequence[float]) -> float:
    """The probability of class 1 of two above which a row is of it."""
    return thresholds[0] if len(thresholds) == 1 else thresholds[1] / (thresholds[0] + thresholds[1])


@dataclass(frozen=True)
class Outputs:
    """The columns that predictions fill."""

    columns: tuple[str, ...]  # names
    widths: tuple[int, ...]  # numbers of a row in each column; 1: a plain double
    contents: tuple[str, ...] = ()  # "class", "probability" or "raw" of each column; (): outputs as they are
    activation: str | None = None  # as in `OutputColumns`, as is the next
    thresholds: tuple[float, ...] = (HALF,)

    @classmethod
    def of(cls, shapes: Sequence[Shape], wanted: OutputColumns) -> Outputs:
        """shapes: of a row of each output of the model. Raises InvalidInput where the columns do not fit it."""
        widths = tuple(map(math.prod, shapes))
        if wanted.activation is not None:
            obstacle = _find_obstacle(shapes, wanted.activation, wanted.thresholds)
            if obstacle is None:
                of_classes, contents = zip(*wanted.list_of_classes(), strict=True)
                widths = tuple(1 if content == "class" else max(2, widths[0]) for content in contents)
                return cls(of_classes, widths, contents, wanted.activation, wanted.thresholds)
            if wanted.required:
                raise InvalidInput(f"{obstacle}, or set raw_outputs=True, for the outputs as they are.")
        columns = wanted.outputs
        if columns is None:
            several = [f"{label}__output" for label in wanted.labels]
            columns = (wanted.prediction,) if len(widths) == 1 else tuple(several)
        if len(columns) != len(widths):
            raise InvalidInput(
                f"the model has {len(widths)} outputs: name as many columns in output_cols, not {len(columns)}."
            )
        return cls(columns, widths)

    def values(self, outputs: Sequence[Floats]) -> list[Floats]:
        """outputs: (rows, width) each. Returns, for each column, (rows, its width)."""
        if self.activation is None:
            return list(outputs)
        probabilities = _compute_probabilities(outputs[0], self.activation)
        found = {"raw": _compute_raw_predictions(outputs[0], self.activation), "probability": probabilities}
        chosen = _choose_classes(probabilities, self.thresholds)
        classes = np.where(np.isnan(probabilities).any(1), np.nan, chosen)
        return [{**found, "class": classes[:, None]}[content] for content in self.contents]


def _find_obstacle(shapes: Sequence[Shape], activation: str, thresholds: Sequence[float]) -> str | None:
    """Why outputs of these shapes are no classes, and what to change; None: they are."""
    if len(shapes) != 1:
        return (
            f"classes are of one output, and the model has {len(shapes)}: let transform's forward return one"
        )
    width = math.prod(shapes[0])
    if sum(size > 1 for size in shapes[0]) > 1:
        return f"classes need one number each, and the model returns {shapes[0]} a row: use the prediction"
    if (activation in SEVERAL and width == 1) or (activation in SINGLE and width > 1):
        return (
            f"activation {activation} makes no class probabilities of {width} numbers a row: "
            f"{' and '.join(SINGLE)} take one, {' and '.join(SEVERAL)} several"
        )
    classes = max(2, width)
    if len(thresholds) > 1 and len(thresholds) != classes:
        return f"thresholds has {len(thresholds)} numbers and the model {classes} classes: give one for each"
    if classes > 2 and thresholds != (HALF,) and len(thresholds) == 1:
        return f"threshold is for two classes, and the model has {classes}: give thresholds"
    return None


def _compute_probabilities(output: Floats, activation: str) -> Floats:
    if activation == "softmax":
        exponents = np.exp(output - output.max(1, keepdims=True))
        found: Floats = exponents / exponents.sum(1, keepdims=True)
        return found
    if activation == "sigmoid":
        found = 0.5 * (1.0 + np.tanh(0.5 * output))  # no overflow
    else:
        found = np.exp(output) if activation == "exp" else output
    return np.concatenate([1.0 - found, found], axis=1) if found.shape[1] == 1 else found


def _compute_raw_predictions(output: Floats, activation: str) -> Floats:
    """What Spark ML's classifiers call rawPrediction. Of two classes it is (-log-odds, log-odds), as LogisticRegression
    has it, since the area under a curve is computed from the second entry alone."""
    if activation == "sigmoid":
        return np.concatenate([-output, output], axis=1)
    if activation in SEVERAL and output.shape[1] == 2:
        odds = output[:, 1:] - output[:, :1]
        return np.concatenate([-odds, odds], axis=1)
    return np.concatenate([1.0 - output, output], axis=1) if output.shape[1] == 1 else output


def _choose_classes(probabilities: Floats, thresholds: Sequence[float]) -> Any:
    """As Spark ML: the class with the largest quotient of probability and threshold; of two, class 1 above its own."""
    if probabilities.shape[1] == 2:
        return probabilities[:, 1] > find_threshold(thresholds)
    if len(thresholds) == 1:
        return probabilities.argmax(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(probabilities / np.array(thresholds), nan=-np.inf, posinf=np.inf).argmax(1)


def as_column(values: Floats) -> Any:
    """(rows, 1) as plain numbers, anything wider as a list of arrays."""
    return values[:, 0] if values.shape[1] == 1 else list(values)
