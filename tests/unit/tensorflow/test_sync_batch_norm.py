"""Batch normalisation over two ranks is that of one process with all rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from elastic_collectives import Group
from tests.unit.ops.workers import run_in_fake_world, use_context_per_thread

ROWS = np.random.default_rng(3).normal(size=(7, 2, 3)) * [1.0, 5.0, 0.1] + [0.0, 100.0, 1.0]
MASK = np.arange(14).reshape(7, 2) % 3 > 0
WEIGHTS = np.random.default_rng(4).normal(size=(7, 2, 3))


@pytest.mark.parametrize("masked", [False, True])
def test_outputs_gradients_and_running_statistics_are_those_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    use_context_per_thread(monkeypatch)

    def layer(kind: Callable[..., Any]) -> Any:
        made = kind(dtype="float64", gamma_initializer="uniform", momentum=0.5)
        made.build((None, 2, 3))
        made.gamma.assign([0.5, 1.0, 2.0])
        return made

    def run(made: Any, rows: slice) -> tuple[Any, Any]:
        x = tf.constant(ROWS[rows])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = made(x, training=True, mask=tf.constant(MASK[rows]) if masked else None)
            loss = tf.reduce_sum(y * WEIGHTS[rows])
        return y.numpy(), tape.gradient(loss, x).numpy()

    whole = layer(tf.keras.layers.BatchNormalization)
    expected = run(whole, slice(None))
    parts = (slice(0, 2), slice(2, 7))

    def work(group: Group) -> tuple[Any, Any, Any]:
        mine = layer(hvd.SyncBatchNormalization)
        y, gradient = run(mine, parts[group.rank])
        return y, gradient, mine.moving_variance.value.numpy()

    for rank, (y, gradient, variance) in enumerate(run_in_fake_world(2, work)):
        np.testing.assert_allclose(y, expected[0][parts[rank]], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(gradient, expected[1][parts[rank]], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(variance, whole.moving_variance.value.numpy(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, as it saves
def test_a_saved_model_loads_its_sync_batch_norm(tmp_path: Path) -> None:
    model = tf.keras.Sequential([tf.keras.Input((3,)), hvd.SyncBatchNormalization(fused=False)])
    model.save(tmp_path / "model.keras")
    assert type(tf.keras.models.load_model(tmp_path / "model.keras").layers[0]) is hvd.SyncBatchNormalization
