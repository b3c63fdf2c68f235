"""R9: layers and losses that make weights depend on the world are named, others are not."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from spark_elastic.keras.train.step import describe_world_dependence

WIDTH = 3


def describe(layer: Any, loss: Any = "mse") -> str | None:
    model = keras.Sequential([keras.Input((4, WIDTH), name="x"), layer])
    model.compile("sgd", loss)
    model._compile_loss.build(model.outputs[0], model.outputs[0])
    return describe_world_dependence(model)


@pytest.mark.parametrize(
    ("layer", "loss", "named"),
    [
        (keras.layers.BatchNormalization, "mse", "batch_normalization.* (BatchNormalization: statistics"),
        (lambda: keras.layers.Dropout(0.1), "mse", "dropout.* (Dropout: random"),
        (lambda: keras.layers.LSTM(2, dropout=0.1), "mse", "lstm_cell.* (LSTMCell: random"),
        (keras.layers.Flatten, "dice", "the loss of flatten.* (dice: computed of each worker's own rows"),
        (keras.layers.Flatten, keras.losses.Tversky(), "the loss of flatten.* (tversky: computed"),
        (keras.layers.Flatten, keras.losses.Dice(axis=(0, 1)), "the loss of flatten.* (dice: computed"),
        (keras.layers.Flatten, keras.losses.Circle(), "the loss of flatten.* (circle: computed"),
    ],
)
def test_r09_what_couples_rows_or_draws_is_named(layer: Any, loss: Any, named: str) -> None:
    sentence = describe(layer(), loss)
    assert sentence is not None
    name, _, why = named.partition(".* ")
    assert name in sentence
    assert why in sentence


@pytest.mark.parametrize(
    ("layer", "loss"),
    [
        (keras.layers.LayerNormalization, "mse"),
        (lambda: keras.layers.Dropout(0.0), "mse"),
        (lambda: keras.layers.LSTM(2), "mse"),
        (keras.layers.Flatten, keras.losses.Dice(axis=1)),
        (keras.layers.Flatten, lambda label, output: keras.ops.mean(label - output)),
    ],
)
def test_r09_what_does_not_couple_rows_is_not_named(layer: Any, loss: Any) -> None:
    assert describe(layer(), loss) is None
