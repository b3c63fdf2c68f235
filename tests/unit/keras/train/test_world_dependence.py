"""R9: layers that make weights depend on the world are named, others are not."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from spark_elastic.training.keras.step import describe_world_dependence

WIDTH = 3


def describe(layer: Any) -> str | None:
    return describe_world_dependence(keras.Sequential([keras.Input((4, WIDTH), name="x"), layer]))


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (keras.layers.BatchNormalization, "batch_normalization.* (BatchNormalization: statistics"),
        (lambda: keras.layers.Dropout(0.1), "dropout.* (Dropout: random"),
        (lambda: keras.layers.LSTM(2, dropout=0.1), "lstm_cell.* (LSTMCell: random"),
    ],
)
def test_r09_what_couples_rows_or_draws_is_named(layer: Any, named: str) -> None:
    sentence = describe(layer())
    assert sentence is not None
    name, _, why = named.partition(".* ")
    assert name in sentence
    assert why in sentence


@pytest.mark.parametrize(
    "layer",
    [keras.layers.LayerNormalization, lambda: keras.layers.Dropout(0.0), lambda: keras.layers.LSTM(2)],
)
def test_r09_what_does_not_couple_rows_is_not_named(layer: Any) -> None:
    assert describe(layer()) is None
