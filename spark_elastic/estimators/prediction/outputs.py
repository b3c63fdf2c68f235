"""What `transform` makes of a model's outputs: which columns, and what is in them. Pure numpy; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import InvalidInput

Floats = npt.NDArray[np.float64]
ACTIVATIONS = ("softmax", "sigmoid", "exp", "identity")


@dataclass(frozen=True)
class Outputs:
    """Columns and the numbers that a row has in each; 1 is a plain double.

    activation: None, or what makes class probabilities of the one output: then the columns are the class, as a double,
    and the probabilities.
    """

    columns: tuple[str, ...]
    widths: tuple[int, ...]
    activation: str | None = None

    @classmethod
    def of(
        cls,
        widths: Sequence[int],
        prediction_col: str,
        probability_col: str | None = None,
        activation: str | None = None,
        output_cols: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> Outputs:
        """widths: numbers a row of each output of the model. Raises InvalidInput where the columns do not fit it."""
        if probability_col is None:
            if output_cols is None:
                output_cols = (
                    [prediction_col] if len(widths) == 1 else [f"{label}__output" for label in labels]
                )
            if len(output_cols) != len(widths):
                raise InvalidInput(
                    f"the model has {len(widths)} outputs: name as many columns in output_cols, not {len(output_cols)}."
                )
            return cls(tuple(output_cols), tuple(widths))
        if len(widths) != 1 or output_cols is not None:
            raise InvalidInput(
                "probability_col needs a model of one output and no output_cols: leave one out."
            )
        if activation not in ACTIVATIONS:
            raise InvalidInput(
                f"probability_col needs activation, one of {', '.join(ACTIVATIONS)}: the loss does not say what makes "
                "probabilities of the model's output."
            )
        if (activation == "softmax" and widths[0] == 1) or (activation == "sigmoid" and widths[0] > 1):
            raise InvalidInput(
                f"activation {activation} makes no class probabilities of {widths[0]} numbers a row: sigmoid takes "
                "one, softmax several."
            )
        return cls((prediction_col, probability_col), (1, max(2, widths[0])), activation)

    @staticmethod
    def known(
        prediction_col: str,
        probability_col: str | None = None,
        output_cols: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """The columns that there will be, where their number does not depend on the model's outputs; else none."""
        if probability_col is not None:
            return (prediction_col, probability_col)
        if output_cols is not None:
            return tuple(output_cols)
        return (prediction_col,) if len(labels) <= 1 else ()

    def values(self, outputs: Sequence[Floats]) -> list[Floats]:
        """outputs: (rows, width) each. Returns, for each column, (rows, its width)."""
        if self.activation is None:
            return list(outputs)
        probabilities = _probabilities(outputs[0], self.activation)
        return [probabilities.argmax(1).astype(np.float64)[:, None], probabilities]


def _probabilities(output: Floats, activation: str) -> Floats:
    if activation == "softmax":
        exponents = np.exp(output - output.max(1, keepdims=True))
        found: Floats = exponents / exponents.sum(1, keepdims=True)
        return found
    if activation == "sigmoid":
        found = 0.5 * (1.0 + np.tanh(0.5 * output))  # no overflow
    else:
        found = np.exp(output) if activation == "exp" else output
    return np.concatenate([1.0 - found, found], axis=1) if found.shape[1] == 1 else found


def as_column(values: Floats) -> Any:
    """(rows, 1) as plain numbers, anything wider as a list of arrays."""
    return values[:, 0] if values.shape[1] == 1 else list(values)
