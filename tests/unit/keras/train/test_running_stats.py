"""What a forward pass writes: put back after an aborted step (R3), counted once in a step of several passes (P2)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from spark_elastic.training.keras.step import RunningStats

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ROWS = np.random.default_rng(1).normal(size=(6, 3)).astype("f")
ALONE: Any = SimpleNamespace(allreduce=lambda array, op: None)


class Counters(keras.layers.Layer):
    """Counts its training passes, as a whole number and as a float."""

    def build(self, shape: Any) -> None:
        self.whole = self.add_weight(
            shape=(), dtype="int32", trainable=False, name="whole", initializer="zeros"
        )
        self.float = self.add_weight(shape=(), trainable=False, name="float", initializer="zeros")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.whole.assign_add(1)
            self.float.assign_add(1.0)
        return x


def make_model() -> Any:
    keras.utils.set_random_seed(1)
    normalized = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    return keras.Sequential([keras.Input((3,)), Counters(), normalized, keras.layers.BatchNormalization()])


@pytest.mark.parametrize("frozen", [False, True])
def test_r03_an_aborted_step_leaves_what_a_forward_pass_wrote_as_it_was(frozen: bool) -> None:
    model = make_model()
    model.layers[1].trainable = not frozen  # SpectralNormalization writes its kernel nevertheless
    before = model.get_weights()
    stats = RunningStats(model)
    stats.begin(1)
    model(ROWS, training=True)
    assert not all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    stats.restore()
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("passes", [1, 3])
def test_several_passes_of_a_step_count_as_one(passes: int) -> None:
    plain, model = make_model(), make_model()
    plain(ROWS, training=True)
    stats = RunningStats(model)
    stats.begin(1)
    for rows in np.split(ROWS, passes):
        model(rows, training=True)
        stats.end_pass(1 / passes)
    changes = stats.take_changes(ALONE)
    stats.apply([each if each is not None else np.zeros(()) for each in changes], np.ones(len(changes), bool))
    *ours, variance = model.get_weights()
    *theirs, whole_variance = plain.get_weights()
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    assert passes > 1 or np.allclose(variance, whole_variance)


class Seen(keras.layers.Layer):
    """Writes its state even if it is frozen; its weight it leaves alone."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), name="factor", initializer="ones")
        self.mean = self.add_weight(shape=(), trainable=False, name="mean", initializer="zeros")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x))
        return x * self.factor


def test_the_state_of_a_frozen_layer_of_the_user_counts_too() -> None:
    model = keras.Sequential([keras.Input((3,)), Seen(), keras.layers.BatchNormalization()])
    model.trainable = False
    stats = RunningStats(model)
    assert [variable.name for variable in stats.variables] == ["mean"]
    stats.begin(1)
    model(ROWS, training=True)
    stats.end_pass(0.5)
    assert model.layers[0].mean.numpy() == 0
    (change,) = stats.take_changes(ALONE)
    assert change == pytest.approx(0.05 * ROWS.mean())
