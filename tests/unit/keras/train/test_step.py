"""A step of Keras: as one process takes it, statistics of all ranks, what depends on the world, a loss of all rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastic_collectives import CollectiveError, Group
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import START, MembershipVersion, Phase, Position
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.keras.compiled import CompiledLosses, CompiledMetrics
from spark_elastic.training.keras.state import KerasTrainingState
from spark_elastic.training.keras.step import (
    RunningStats,
    StepLossStep,
    Structure,
    TrainStep,
    describe_world_dependence,
)
from spark_elastic.training.progress import TrainingProgress
from spark_elastic.training.trainer import StepCall, take_validation_step
from tests.fake_group import FakeFabric
from tests.fit_configs import make_config

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# The change of BatchNorm's variance is larger than what float16 holds.
LARGE = np.random.default_rng(1).normal(scale=5e3, size=(8, 1)).astype("f")


def make_model(normalizes: bool) -> Any:
    keras.utils.set_random_seed(1)
    between = [keras.layers.BatchNormalization()] if normalizes else []
    model = keras.Sequential([keras.Input((1,)), *between, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    return model


def take_step(model: Any, group: Group, compression: str | None) -> None:
    """With this rank's half of the rows."""
    structure = Structure(inputs=lambda arrays: arrays[0], outputs=lambda values: values[0])
    losses = CompiledLosses(model, LARGE, model(LARGE))
    metrics = CompiledMetrics(model, losses.names, structure.outputs, eager=True)
    metrics.build(LARGE, model(LARGE))
    state = KerasTrainingState(model.weights, [], None, TrainingProgress())
    config = make_config(gradient_compression=compression)
    step = TrainStep(config, model, state, losses, structure, metrics, Ledger())
    rows = np.arange(4) + 4 * group.rank
    batch = LocalBatch(len(LARGE), rows, (LARGE[rows],), (LARGE[rows],), None)
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
        halves = LARGE.reshape(2, 4)
        for model in models:
            _, _, mean, variance = model.layers[0].get_weights()
            np.testing.assert_allclose(mean, [0.01 * halves.mean()], rtol=1e-4)
            np.testing.assert_allclose(variance, [0.99 + 0.01 * halves.var(1).mean()], rtol=1e-4)


FEW = np.random.default_rng(1).normal(size=(6, 3)).astype("f")
ALONE: Any = SimpleNamespace(allreduce=lambda array, op: None)


class Counters(keras.layers.Layer):
    """Counts its training passes, as a whole number and as a float."""

    def build(self, shape: Any) -> None:
        kind: Any = {"shape": (), "trainable": False, "initializer": "zeros"}
        self.whole = self.add_weight(dtype="int32", name="whole", **kind)
        self.float = self.add_weight(name="float", **kind)

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
    model(FEW, training=True)
    assert not all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    stats.restore()
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("passes", [1, 3])
def test_several_passes_of_a_step_count_as_one(passes: int) -> None:
    plain, model = make_normed(), make_normed()
    plain(FEW, training=True)
    stats = RunningStats(model)
    stats.begin(1)
    for rows in np.split(FEW, passes):
        model(rows, training=True)
        stats.end_pass(1 / passes)
    changes = stats.take_changes(ALONE)
    stats.apply([each if each is not None else np.zeros(()) for each in changes], np.ones(len(changes), bool))
    *ours, variance = model.get_weights()
    *theirs, whole_variance = plain.get_weights()
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    assert passes > 1 or np.allclose(variance, whole_variance)


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
    said = describe_world_dependence(keras.Sequential([keras.Input((4, 3), name="x"), layer()]))
    assert said is None if named is None else all(words in str(said) for words in named)


ROWS, WIDTH = 6, 4
DRAWN = np.random.default_rng(0)
X, WEIGHTS = DRAWN.normal(size=(ROWS, WIDTH)), DRAWN.uniform(size=ROWS)
# Of each output; the numbers of classes.
Y = [np.arange(ROWS) % 3, DRAWN.normal(size=(ROWS, 1)), np.zeros(ROWS)]


@pytest.fixture
def _float64() -> Any:
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


def compare_pairs(label: Any, output: Any) -> Any:
    """InfoNCE: each row is to be nearest to itself. A number for each row."""
    left, right = keras.ops.split(keras.ops.normalize(output), 2, axis=-1)
    near = keras.ops.matmul(left, keras.ops.transpose(right)) / 0.1
    own = keras.ops.arange(keras.ops.shape(near)[0])
    return keras.losses.sparse_categorical_crossentropy(own, near, from_logits=True)


def correlate(label: Any, output: Any) -> Any:
    """One number."""
    label, output = (each - keras.ops.mean(each) for each in (label, output))
    near = keras.ops.mean(label * output)
    return 1 - near / (keras.ops.std(label) * keras.ops.std(output) + 1e-3)


def spread(label: Any, output: Any) -> Any:
    """A penalty of a variance."""
    return keras.ops.mean(keras.ops.relu(1 - keras.ops.std(output, axis=0)))


class Counted(keras.layers.Layer):
    """Has a metric of its own: the rows of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = keras.metrics.Sum("rows")

    def call(self, x: Any) -> Any:
        self.rows.update_state(keras.ops.ones_like(x[:, 0]))
        return x


def build(*, eager: bool = False, draws: bool = False, scale: float | None = None) -> Any:
    """Three outputs, whose losses compare rows, with weights; an embedding, penalties of weights and of activity."""
    keras.utils.set_random_seed(1)
    x = keras.Input((WIDTH,), name="x")
    coded = keras.layers.Embedding(4, 3, activity_regularizer="l2")(keras.ops.cast(x[:, 0] > 0, "int32"))
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2")(x)
    hidden = keras.layers.Concatenate()([hidden, coded])
    if draws:
        hidden = keras.layers.SpectralNormalization(keras.layers.Dense(6))(Counted()(hidden))
        hidden = keras.layers.Dropout(0.4)(keras.layers.BatchNormalization()(hidden))
    heads = [keras.layers.Dense(n, name=name)(hidden) for n, name in ((8, "a"), (1, "b"), (2, "c"))]
    model = keras.Model(x, heads)
    losses = [compare_pairs, correlate, keras.losses.get(spread)]
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=scale),
        losses,
        loss_weights=[1.0, 0.7, 0.3],
        metrics=[[], ["mae"], []],
        run_eagerly=eager,
    )
    return model


class Trainee:
    """A model that takes steps of all rows, in parts of up to 2."""

    def __init__(self, model: Any, weighted: bool = False) -> None:
        self.model, self.weighted = model, weighted
        structure = Structure(lambda arrays: arrays[0], list)
        first = [each[:1] for each in Y]
        model.optimizer.build(model.trainable_variables)
        losses = CompiledLosses(model, first, model(X[:1]))
        self.metrics = CompiledMetrics(model, losses.names, list, eager=bool(model.run_eagerly))
        self.metrics.build(first, model(X[:1]))
        variables = [*model.weights, *model.optimizer.variables]
        self.state = KerasTrainingState(variables, [], None, TrainingProgress())
        config = make_config(label_cols=("a", "b", "c"), batch_size=2, loss_scope="step", seed=7)
        self.step = StepLossStep(config, model, self.state, losses, structure, self.metrics, Ledger())

    def take(self, group: Group, validates: bool = False) -> StepDecision:
        rows = np.arange(ROWS * group.rank // group.size, ROWS * (group.rank + 1) // group.size)
        weights = WEIGHTS[rows] if self.weighted else None
        batch = LocalBatch(ROWS, rows, (X[rows],), tuple(each[rows] for each in Y), weights)
        call = StepCall(group, MembershipVersion(), lambda _: Position(0, Phase.TRAIN, 1))
        if validates:
            compute = partial(self.step.compute_loss, group, batch)
            return take_validation_step(self.state, batch, self.metrics, call, compute)
        return self.step.run(batch, call)


def run_in_world(size: int, work: Callable[[Group], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, FakeFabric(size).groups))


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(("size", "weighted", "eager"), [(1, False, False), (7, True, True)])
def test_r08_r09_any_world_has_the_loss_of_one_process(size: int, weighted: bool, eager: bool) -> None:
    """7 ranks for 6 rows: one has none."""
    trainees = [Trainee(build(eager=eager, scale=64.0), weighted) for _ in range(size)]
    plain = build(eager=True)
    logs = plain.train_on_batch(X, Y, sample_weight=WEIGHTS if weighted else None, return_dict=True)
    weights = plain.get_weights()
    validated = plain.test_on_batch(X, Y, sample_weight=WEIGHTS if weighted else None, return_dict=True)

    def work(group: Group) -> None:
        trainee = trainees[group.rank]
        for expected, validates in ((logs, False), (validated, True)):
            decision = trainee.take(group, validates)
            assert decision.loss / decision.denominator == pytest.approx(float(expected["loss"]), rel=1e-9)
            found = trainee.metrics.results()
            assert set(found) == {"a_loss", "b_loss", "c_loss", "b_mae"}
            trainee.metrics.reset()
            # Keras weights its numbers of single losses.
            if not weighted:
                assert found["b_mae"] == pytest.approx(float(expected["b_mae"]), rel=1e-9)
                for name in ("a_loss", "b_loss", "c_loss"):
                    assert found[name] == pytest.approx(float(expected[name]), rel=1e-6)
        trainee.step.close()

    run_in_world(size, work)
    assert len({trainee.state.digest() for trainee in trainees}) == 1
    for ours, theirs in zip(trainees[0].model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def take_step_of_parts(model: Any) -> None:
    """What a step of one rank is to be: every part drawn once, one gradient of the loss of all."""
    stats, key, outputs = RunningStats(model), (7, START.epoch, START.phase, START.step, 0), []
    added: list[Any] = []
    losses = CompiledLosses(model, [each[:1] for each in Y], model(X[:1]))
    stats.begin(*key)
    with tf.GradientTape() as tape:
        for number, rows in enumerate(np.split(np.arange(ROWS), [2, 4])):
            stats.seed(*key, number)
            outputs.append(model(X[rows], training=True))
            added.append(losses.total_of_layers(len(rows), tf.constant(len(rows) / ROWS, tf.float64)))
            stats.end_pass(len(rows) / ROWS)
        whole = [tf.concat(each, 0) for each in zip(*outputs, strict=True)]
        factors = tf.constant([1 / ROWS] * 3, tf.float64)
        loss = losses.total_of_outputs(Y, whole, None, factors)[0] + sum(added)
    gradients = tape.gradient(loss, model.trainable_variables)
    changes = [0.0 if each is None else each for each in stats.take_changes(FakeFabric(1).group(0))]
    stats.apply(changes, np.ones(len(changes), bool))  # type: ignore[arg-type]
    model.optimizer.apply([tf.convert_to_tensor(each) for each in gradients], model.trainable_variables)


class Breaking:
    """A peer is lost while outputs are gathered."""

    rank, size, fence = 0, 1, (1, 1)

    def allgather_bytes(self, blob: bytes) -> list[bytes]:
        raise CollectiveError([1], "a peer is gone")


@pytest.mark.usefixtures("_float64")
def test_r03_parts_that_run_twice_draw_the_same_numbers_and_write_buffers_once() -> None:
    """Also where the step before them ended in the middle."""
    plain, trainee, group = build(draws=True), Trainee(build(eager=True, draws=True)), FakeFabric(1).group(0)
    take_step_of_parts(plain)
    before = trainee.state.digest()
    with pytest.raises(CollectiveError):
        trainee.take(Breaking())  # type: ignore[arg-type]
    assert trainee.state.digest() == before
    trainee.take(group)
    trained = [np.array(each) for each in trainee.model.weights]
    trainee.take(group, validates=True)
    trainee.step.close()
    assert trainee.metrics.results()["rows"] == 2 * ROWS
    for ours, theirs in zip(trained, plain.weights, strict=True):
        if "seed" not in theirs.path:
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12, err_msg=theirs.path)
