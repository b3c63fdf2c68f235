"""Steps and losses of a compiled model, in parts of a step's rows and on several ranks: what Keras makes of them."""

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
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import START, MembershipVersion, Phase, Position
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.keras.compiled import (
    SUMS_ACTIVITY,
    CompiledLosses,
    CompiledMetrics,
    activity_by_row,
)
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
TOKENS, CLASSES = 5, 3
# Of two ranks: nine labels of the first one count, and four of the second one.
LABELS = [np.array([[0, 2, 1, 2, 0], [2, 2, 0, 0, 0]]), np.array([[1, 1, 1, 0, 2], [1, 1, 1, 2, 0]])]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("labels", [LABELS, [np.ones_like(each) for each in LABELS]], ids=["some", "none"])
def test_labels_that_do_not_count_are_not_divided_by(reduction: str, labels: list[Any]) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1, reduction=reduction)
    model = keras.Sequential([keras.Input((TOKENS, CLASSES)), keras.layers.Activation("linear")])
    model.compile("sgd", loss)
    outputs = [np.random.default_rng(r).normal(size=(2, TOKENS, CLASSES)).astype("f") for r in range(2)]
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
