"""Losses of a compiled model, summed over parts of a step's rows: what Keras computes of all rows at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.keras.compiled import (
    SUMS_ACTIVITY,
    CompiledLosses,
    CompiledMetrics,
    activity_by_row,
)
from tests.fake_group import FakeFabric

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WIDTH, CLASSES = 5, 3
# Of two ranks: nine labels of the first one count, and four of the second one.
LABELS = [np.array([[0, 2, 1, 2, 0], [2, 2, 0, 0, 0]]), np.array([[1, 1, 1, 0, 2], [1, 1, 1, 2, 0]])]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("labels", [LABELS, [np.ones_like(each) for each in LABELS]], ids=["some", "none"])
def test_labels_that_do_not_count_are_not_divided_by(reduction: str, labels: list[Any]) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1, reduction=reduction)
    model = keras.Sequential([keras.Input((WIDTH, CLASSES)), keras.layers.Activation("linear")])
    model.compile("sgd", loss)
    outputs = [np.random.default_rng(r).normal(size=(2, WIDTH, CLASSES)).astype("f") for r in range(2)]
    compiled = CompiledLosses(model, labels[0][:1], model(outputs[0][:1]))
    pairs = list(zip(outputs, labels, strict=True))
    batches = [LocalBatch(4, np.arange(2), (output,), (label,), None) for output, label in pairs]
    divisors: list[Any] = []

    def find_factors(batch: Any) -> list[float]:
        group: Any = SimpleNamespace(allgather=lambda own: divisors.append(own) or np.stack(divisors))
        return compiled.factors(group, batch)

    find_factors(batches[0])
    factors = find_factors(batches[1])  # knows of both ranks
    parts = [float(compiled.total(label, output, None, factors, 0.5)[0]) for output, label in pairs]
    assert sum(parts) == pytest.approx(float(loss(np.concatenate(labels), np.concatenate(outputs))), rel=1e-6)


@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", keras.losses.SparseCategoricalCrossentropy()]
)
def test_classes_that_are_no_whole_numbers_are_refused(loss: Any) -> None:
    model = keras.Sequential([keras.Input((CLASSES,)), keras.layers.Softmax()])
    model.compile("sgd", loss)
    rows, labels, group = np.ones((3, CLASSES), "f"), np.array([0.0, 2.0, 0.5], "f"), FakeFabric(1).group(0)
    losses = CompiledLosses(model, labels[:1], model(rows[:1]), ["kind"])
    losses.factors(group, LocalBatch(2, np.arange(2), (rows[:2],), (labels[:2],), None))
    with pytest.raises(InvalidInput, match=r"column 'kind' has 0.5, and sparse_cat.* whole numbers"):
        losses.factors(group, LocalBatch(3, np.arange(3), (rows,), (labels,), None))


def test_labels_of_two_classes_lie_between_0_and_1() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("sigmoid")])
    model.compile("sgd", "binary_crossentropy")
    rows, labels = np.ones((2, 1), "f"), np.array([1.0, 2.0], "f")
    losses = CompiledLosses(model, labels, model(rows), ["left"])
    with pytest.raises(InvalidInput, match="'left' has 2, and binary_crossentropy takes labels from 0 to 1"):
        losses.check_labels(LocalBatch(2, np.arange(2), (rows,), (labels,), None))


def test_activity_penalties_that_older_keras_sums_are_a_number_for_each_row(monkeypatch: Any) -> None:
    monkeypatch.setattr("spark_elastic.training.keras.compiled.SUMS_ACTIVITY", True)
    layer = keras.layers.Dense(2, activity_regularizer="l2")
    model, rows = keras.Sequential([keras.Input((3,)), layer]), np.ones((4, 3), "f")
    own = layer.activity_regularizer
    penalty = float(own(layer(rows)))
    with activity_by_row(model, 4):
        model(rows)
    assert layer.activity_regularizer is own
    (spread,) = model.losses
    assert spread.shape == (4,)
    # Later Keras divides.
    assert float(np.sum(spread)) * (1 if SUMS_ACTIVITY else 4) == pytest.approx(penalty)


def test_a_loss_that_a_layer_has_for_each_row_is_summed_as_in_keras() -> None:
    class PerRow(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.sum(x, axis=-1))
            self.add_loss(keras.ops.mean(x))
            return x

    model, rows = keras.Sequential([keras.Input((2,)), PerRow()]), np.arange(12, dtype="f").reshape(6, 2)
    model.compile("sgd", "mse")
    compiled = CompiledLosses(model, rows[:1], model(rows[:1]))
    parts = [rows[:2], rows[2:]]
    totals = [float(compiled.total(p, model(p), None, [0.0], len(p) / 6)[0]) for p in parts]
    assert sum(totals) == pytest.approx(rows.sum() + rows.mean())


class Watched(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.high = keras.metrics.Mean("seen"), keras.metrics.Precision(name="high")

    def call(self, x: Any) -> Any:
        self.seen.update_state(x)
        self.high.update_state(x > 2, x > 1)
        return x


def test_metrics_of_layers_are_of_the_passes_of_steps_that_were_applied() -> None:
    model, group = keras.Sequential([keras.Input((1,)), Watched()]), FakeFabric(1).group(0)
    model.compile("sgd", "mse", metrics=["mae"])
    metrics = CompiledMetrics(model, [], lambda outputs: outputs[0], eager=True)

    def take_pass(*numbers: float) -> None:
        rows = np.array([numbers], "f").T
        part = LocalBatch(len(rows), np.arange(len(rows)), (rows,), (np.zeros_like(rows),), None)
        metrics.add(part, [], [np.asarray(model(rows))])

    sample = np.zeros((1, 1), "f")
    metrics.build(sample, model(sample))
    take_pass(100.0)
    metrics.discard()
    for numbers in ((1.0, 2.0), (6.0,)):
        take_pass(*numbers)
    metrics.gather(group)
    metrics.commit()
    for _ in range(2):
        found = metrics.results()
        assert found == pytest.approx({"mae": 3.0, "seen": 3.0, "high": 0.5})
    metrics.reset()
    assert metrics.results()["seen"] == 0
