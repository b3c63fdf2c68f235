"""A step of Keras: as one process takes it, statistics of all ranks, and what depends on the size of the world."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from elastic_collectives import Group
from spark_elastic.protocol.types import MembershipVersion, Phase, Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.keras.compiled import CompiledLosses, CompiledMetrics
from spark_elastic.training.keras.state import KerasTrainingState
from spark_elastic.training.keras.step import RunningStats, Structure, TrainStep, describe_world_dependence
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.progress import TrainingProgress
from spark_elastic.training.trainer import StepCall
from tests.fake_group import FakeFabric
from tests.fit_configs import make_config

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# The change of BatchNorm's variance is larger than what float16 holds.
X = np.random.default_rng(1).normal(scale=5e3, size=(8, 1)).astype("f")


class NoCallbacks:
    def capture(self) -> dict[str, Any]:
        return {}

    def load(self, values: Any) -> None:
        """Nothing."""


def make_model(normalizes: bool) -> Any:
    keras.utils.set_random_seed(1)
    between = [keras.layers.BatchNormalization()] if normalizes else []
    model = keras.Sequential([keras.Input((1,)), *between, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    return model


def take_step(model: Any, group: Group, compression: str | None) -> None:
    """With this rank's half of the rows."""
    structure = Structure(inputs=lambda arrays: arrays[0], outputs=lambda values: values[0])
    losses = CompiledLosses(model, X, model(X))
    metrics = CompiledMetrics(model, losses.names, structure.outputs, eager=True)
    metrics.build(X, model(X))
    state = KerasTrainingState(model.weights, [], NoCallbacks(), TrainingProgress())
    config = make_config(gradient_compression=compression)
    step = TrainStep(config, model, state, losses, structure, metrics, Ledger())
    rows = np.arange(4) + 4 * group.rank
    batch = LocalBatch(len(X), rows, (X[rows],), (X[rows],), None)
    step.run(batch, StepCall(group, MembershipVersion(), lambda _: Position(0, Phase.TRAIN, 1)))
    step.close()


@pytest.mark.parametrize(
    ("normalizes", "compression", "formats"),
    [(True, "fp16", ["fp16", None]), (True, None, [None]), (False, "fp16", ["fp16"])],
)
def test_running_statistics_travel_uncompressed_and_on_their_own_only_beside_compressed_gradients(
    normalizes: bool, compression: str | None, formats: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, fabric, seen = [make_model(normalizes) for _ in range(2)], FakeFabric(2), []
    first, allreduce = fabric.group(0), fabric.group(0).allreduce

    def record(array: Any, *args: Any, **how: Any) -> None:
        seen.extend([how.get("compression")] if array.dtype == np.float32 else [])
        allreduce(array, *args, **how)

    monkeypatch.setattr(first, "allreduce", record)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take_step, models, fabric.groups, [compression] * 2))
    assert seen == formats
    if normalizes:
        halves = X.reshape(2, 4)
        for model in models:
            _, _, mean, variance = model.layers[0].get_weights()
            np.testing.assert_allclose(mean, [0.01 * halves.mean()], rtol=1e-4)
            np.testing.assert_allclose(variance, [0.99 + 0.01 * halves.var(1).mean()], rtol=1e-4)


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


def make_normed() -> Any:
    keras.utils.set_random_seed(1)
    normalized = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    return keras.Sequential([keras.Input((3,)), Counters(), normalized, keras.layers.BatchNormalization()])


@pytest.mark.parametrize("frozen", [False, True])
def test_r03_an_aborted_step_leaves_what_a_forward_pass_wrote_as_it_was(frozen: bool) -> None:
    model = make_normed()
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
    plain, model = make_normed(), make_normed()
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


WIDTH = 3


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (keras.layers.BatchNormalization, ("batch_normalization", "(BatchNormalization: statistics")),
        (lambda: keras.layers.Dropout(0.1), ("dropout", "(Dropout: random")),
        (lambda: keras.layers.LSTM(2, dropout=0.1), ("lstm_cell", "(LSTMCell: random")),
        (keras.layers.LayerNormalization, None),
        (lambda: keras.layers.Dropout(0.0), None),
        (lambda: keras.layers.LSTM(2), None),
    ],
)
def test_r09_what_couples_rows_or_draws_is_named(layer: Any, named: tuple[str, ...] | None) -> None:
    said = describe_world_dependence(keras.Sequential([keras.Input((4, WIDTH), name="x"), layer()]))
    assert said is None if named is None else all(words in str(said) for words in named)
