"""Keras's `fit` in one process: callbacks, the distributed optimizer, positions over interruptions; Keras on torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import torch

import spark_elastic.keras as hvd
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import Adasum, Average, ReduceOp, ReduceOptions
from spark_elastic.horovod.keras import callbacks as schedules
from spark_elastic.horovod.keras.optimizer import TorchExchange
from spark_elastic.horovod.ops.distributed_optimizer import GradientOptions, wrap_optimizer
from spark_elastic.horovod.torch import operations
from tests.sources import PYTHONPATH

SAVES = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, as it saves
X = np.random.default_rng(0).normal(size=(24, 3))
Y = X.sum(axis=1, keepdims=True)


def build_compiled(optimizer: Any = None, **how: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float64")])
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **how)
    return model


class Position(dict[str, int]):
    """A state that keeps nothing but what it is told, and interrupts at some commits."""

    def __init__(self, interrupt_at: tuple[int, ...] = ()) -> None:
        self.epoch = self.batch = self.commits = 0
        self.kept = (0, 0)
        self._interrupt_at = interrupt_at

    def in_mid_step(self) -> bool:
        return False

    def make_commit(self) -> None:
        self.commits += 1
        self.kept = self.epoch, self.batch

    def commit(self) -> None:
        self.make_commit()
        if self.commits in self._interrupt_at:
            raise hvd.HostsUpdatedInterrupt

    def restore(self) -> None:
        self.epoch, self.batch = self.kept


def record_positions(state: Position, steps: list[tuple[int, int]]) -> Any:
    def record(batch: int, logs: Any) -> None:
        steps.append((state.epoch, state.batch))

    return keras.callbacks.LambdaCallback(on_train_batch_begin=record)


def record_rates(rates: list[float]) -> Any:
    """The learning rate of each batch."""

    def record(batch: int, logs: Any) -> None:
        rates.append(round(float(np.asarray(recorder.model.optimizer.learning_rate)), 6))

    recorder = keras.callbacks.LambdaCallback(on_train_batch_end=record)
    return recorder


def fit_with_interruptions(state: Position, epochs: int, *callbacks: Any) -> int:
    """Six steps an epoch; how often `fit` was called."""
    model, calls = build_compiled(keras.optimizers.SGD(0.4)), 0
    while state.epoch < epochs:
        calls += 1
        how: dict[str, Any] = {"batch_size": 4, "steps_per_epoch": 6, "verbose": 0, "callbacks": callbacks}
        try:
            model.fit(X, Y, initial_epoch=state.epoch, epochs=epochs, **how)
        except hvd.HostsUpdatedInterrupt:
            state.restore()
    return calls


def make_updates(state: Position) -> list[Any]:
    return [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]


def test_a_per_batch_learning_rate_continues_where_the_epoch_was_interrupted() -> None:
    def rates(interrupt_at: tuple[int, ...]) -> list[float]:
        state, seen = Position(interrupt_at), list[float]()
        ramp = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda at: 1 / (1 + at), staircase=False)
        commit = hvd.elastic.CommitStateCallback(state)
        fit_with_interruptions(state, 2, record_rates(seen), ramp, *make_updates(state), commit)
        return seen

    assert rates((3, 5, 9)) == rates(()) == [round(0.4 / (1 + k / 6), 6) for k in range(12)]


@pytest.mark.parametrize("commit_first", [True, False])
def test_the_position_is_exact_over_many_interruptions_of_an_epoch(commit_first: bool) -> None:
    state = Position(interrupt_at=(2, 4, 5, 9, 14))
    steps = list[tuple[int, int]]()
    commit, seen = hvd.elastic.CommitStateCallback(state), record_positions(state, steps)
    update = make_updates(state)
    callbacks = [commit, *update, seen] if commit_first else [*update, commit, seen]
    assert fit_with_interruptions(state, 3, *callbacks) == 6
    assert steps == [(epoch, batch) for epoch in range(3) for batch in range(6)]
    assert (state.epoch, state.batch, state.kept) == (3, 0, (3, 0))


def test_a_fit_that_a_callback_has_ended_is_not_interrupted_at_its_last_commit() -> None:
    class Stop(keras.callbacks.Callback):  # type: ignore[misc] # untyped
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    state = Position(interrupt_at=(2,))
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=100)
    build_compiled().fit(X, Y, epochs=6, verbose=0, callbacks=[commit, Stop(), *make_updates(state)])
    assert (state.commits, state.kept) == (2, (2, 0))


def test_commits_can_be_rarer_and_a_fit_of_the_rest_is_left_alone() -> None:
    state = Position()
    callbacks = [hvd.elastic.CommitStateCallback(state, batches_per_commit=4)]
    build_compiled().fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    assert state.commits == 4  # after four batches, and at the end of each epoch
    state.batch = 2
    steps = list[tuple[int, int]]()
    update = hvd.elastic.UpdateBatchStateCallback(state, steps_per_epoch=6)
    rest = [update, record_positions(state, steps)]
    build_compiled().fit(X, Y, batch_size=4, steps_per_epoch=4, verbose=0, callbacks=rest)
    assert [batch for _, batch in steps] == [2, 3, 4, 5]


def test_commits_count_the_batches_of_a_call() -> None:
    state = Position()
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=4)
    model = build_compiled(steps_per_execution=2)
    model.fit(X, Y, batch_size=2, verbose=0, callbacks=[commit])
    assert state.commits == 3  # of 12 batches


def test_a_schedule_takes_the_steps_of_each_fit() -> None:
    rates: list[float] = []
    ramp = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False)
    for batch_size in (6, 12):
        build_compiled().fit(X, Y, batch_size=batch_size, verbose=0, callbacks=[ramp, record_rates(rates)])
    assert rates == [0.0, 0.25, 0.5, 0.75, 0.0, 0.5]


def test_ranks_keep_their_own_seeds_of_random_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(schedules, "broadcast_variables", lambda variables, root: sent.extend(variables))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert {id(v) for v in sent} == {id(v) for v in [*model.weights, *model.optimizer.variables]}


def test_learning_rates_follow_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "size", lambda: 4)
    rates: list[float] = []
    warm = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    steps = hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.1**epoch, start_epoch=2)
    model = build_compiled(keras.optimizers.SGD(0.4, momentum=0.5))
    history = model.fit(
        X, Y, batch_size=12, epochs=4, verbose=0, callbacks=[warm, steps, record_rates(rates)]
    )
    assert rates == pytest.approx([0.175, 0.25, 0.325, 0.4, 0.004, 0.004, 0.0004, 0.0004])
    assert history.history["lr"] == pytest.approx([0.25, 0.4, 0.004, 0.0004])
    scheduled = build_compiled(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)))
    with pytest.raises(InvalidInput, match="a schedule of its own"):
        scheduled.fit(X, Y, verbose=0, callbacks=[steps.__class__(0.4, 0.5)])


@pytest.mark.parametrize("scaled", [False, True])
def test_momentum_is_corrected_as_the_learning_rate_changes(scaled: bool) -> None:
    steps = keras.optimizers.SGD(0.4, momentum=0.5)
    model = build_compiled(keras.optimizers.LossScaleOptimizer(steps, initial_scale=4.0) if scaled else steps)
    model.fit(X, Y, verbose=0)
    velocity = steps.momentums[0].numpy()
    halved = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5)
    halved.set_model(model)
    halved.on_epoch_begin(0)
    assert np.any(velocity)
    np.testing.assert_allclose(steps.momentums[0].numpy(), velocity / 2)


@SAVES
def test_a_distributed_optimizer_is_the_same_optimizer_and_saves_as_the_plain_one(tmp_path: Path) -> None:
    plain = keras.optimizers.Adam(0.01)
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert optimizer.learning_rate is plain.learning_rate
    model = build_compiled(optimizer)
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(tmp_path / "best.keras"))
    begin, average = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[begin, average, best])
    for load in (keras.models.load_model, hvd.load_model):
        loaded = load(best.filepath)
        assert isinstance(loaded.optimizer, keras.optimizers.Adam)
        assert int(loaded.optimizer.iterations.numpy()) == 2
        loaded.fit(X, Y, verbose=0)
    with pytest.raises(InvalidInput, match="once"):
        hvd.DistributedOptimizer(optimizer)


@SAVES
def test_a_class_of_custom_objects_that_exchanges_gradients_is_not_wrapped_again(tmp_path: Path) -> None:
    optimizer = hvd.DistributedOptimizer(Unregistered(0.1), backward_passes_per_step=2)
    build_compiled(optimizer).save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_objects={"Unregistered": type(optimizer)})
    assert type(loaded.optimizer) is type(optimizer)
    loaded.fit(X, Y, verbose=0, batch_size=len(X), epochs=2)
    assert int(loaded.optimizer.iterations.numpy()) == 1


class Unregistered(keras.optimizers.SGD):  # type: ignore[misc] # untyped
    """An optimizer of the user's that Keras does not know."""


def test_an_optimizer_made_from_its_configuration_exchanges_gradients() -> None:
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    second = type(first).from_config(first.get_config())
    model = build_compiled(second)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert int(second.iterations.numpy()) == 3
    assert not first.built


def test_loss_scaling_wraps_inside_the_distributed_optimizer() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
    model, expected = build_compiled(), build_compiled()
    model.compile(hvd.DistributedOptimizer(scaled, backward_passes_per_step=2), "mse")
    model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    expected.compile(keras.optimizers.SGD(0.2), "mse")
    expected.fit(X, Y, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], expected.get_weights()[0], rtol=1e-5)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        says = r"use DistributedOptimizer\(keras\.optimizers\.LossScaleOptimizer"
        with pytest.raises(InvalidInput, match=says):
            build_compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("eager", [False, True])
def test_passes_are_summed_before_they_are_applied(eager: bool) -> None:
    expected, model = build_compiled(), build_compiled(run_eagerly=eager)
    how = {"backward_passes_per_step": 3, "average_aggregated_gradients": True}
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **how)
    model.compile(wrapped, "mse", run_eagerly=eager)
    expected.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert int(wrapped.iterations.numpy()) == 2
    np.testing.assert_allclose(model.get_weights()[0], expected.get_weights()[0], rtol=1e-5)


def test_xla_is_refused_in_a_sentence() -> None:
    model = build_compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    with pytest.raises(InvalidInput, match=r"jit_compile=False to model\.compile"):
        model.fit(X, Y, verbose=0)


def test_metrics_of_several_numbers_are_averaged_number_by_number() -> None:
    logs = {"f1": np.array([1.0, 2.0]), "loss": keras.ops.convert_to_tensor(3.0), "lr": 0.5}
    logs["confused"] = np.array([[1.0, 2.0], [3.0, 4.0]]).T
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs["f1"].tolist() == [1.0, 2.0]
    assert logs["confused"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert (logs["loss"], logs["lr"]) == (3.0, 0.5)
    assert isinstance(logs["loss"], float)


class RecordingOptimizer:
    """Keeps what it is told to apply."""

    def __init__(self) -> None:
        self.applied: list[list[Any]] = []

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.applied.append([gradient.tolist() for gradient in grads])

    apply_gradients = build = apply
    built = True


def distribute(
    optimizer: Any,
    passes: int = 1,
    process_set: ProcessSet = global_process_set,
    scale_local: bool = True,
    op: ReduceOp = Average,
) -> Any:
    options = GradientOptions(ReduceOptions(op, process_set=process_set), False, 0, scale_local)
    return wrap_optimizer(optimizer, lambda: TorchExchange(options, passes, False), keras.utils)


@pytest.mark.parametrize(("scaled", "expected"), [(True, [2.0, 8.0]), (False, [8.0, 8.0])])
def test_local_sums_are_divided(monkeypatch: pytest.MonkeyPatch, scaled: bool, expected: list[float]) -> None:
    monkeypatch.setattr(operations, "start", lambda tensors, *how, **when: lambda: tensors)
    four: Any = SimpleNamespace(size=lambda: 4, included=lambda: True)
    optimizer: Any = distribute(RecordingOptimizer(), process_set=four, scale_local=scaled)
    mine, shared = object(), object()
    optimizer.register_local_var(mine)
    optimizer.apply([torch.tensor(8.0), torch.tensor(8.0)], [mine, shared])
    assert optimizer.applied == [expected]


def test_a_rank_outside_of_the_process_set_trains_alone() -> None:
    others: Any = SimpleNamespace(size=lambda: 4, included=lambda: False)
    optimizer: Any = distribute(RecordingOptimizer(), process_set=others)
    optimizer.apply([torch.tensor(8.0)], [object()])
    assert optimizer.applied == [[8.0]]


@pytest.mark.parametrize(
    ("optimizer", "arguments", "says"),
    [
        (RecordingOptimizer(), {"op": Adasum}, "must be Average or Sum; got"),
        (RecordingOptimizer(), {"passes": 0}, "must be at least 1; got 0"),
        (distribute(RecordingOptimizer()), {}, "of Keras 3 once; got a RecordingOptimizer"),
        (torch.nn.Linear(1, 1), {}, "wraps an optimizer of Keras 3 once; got a Linear"),
    ],
)
def test_wrong_arguments_are_refused(optimizer: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        distribute(optimizer, **arguments)


PROGRAM = """
import sys
import keras, numpy as np
import spark_elastic.keras as hvd

def trained(optimizer, batch_size):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    model.fit(x, x.sum(1), batch_size=batch_size, shuffle=False, verbose=0)
    return model

plain = trained(keras.optimizers.Adam(0.1), 12)
ours = trained(
    hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.1), backward_passes_per_step=3, average_aggregated_gradients=True,
        name="n", compression=hvd.Compression.none, sparse_as_dense=True, groups=2,
    ),
    4,
)
weights = [keras.ops.convert_to_numpy(w.value) for w in ours.weights]
for a, w in zip(weights, plain.weights, strict=True):
    np.testing.assert_allclose(a, keras.ops.convert_to_numpy(w.value), rtol=1e-4)
state = hvd.elastic.KerasState(ours, batch=3)
state.save()
for w in ours.weights:
    w.assign(w * 0)
state.batch = 9
state.restore()
assert state.batch == 3
for a, w in zip(weights, ours.weights, strict=True):
    assert np.array_equal(a, keras.ops.convert_to_numpy(w.value))
ours.save(sys.argv[1])
loaded = hvd.load_model(sys.argv[1])
loaded.fit(np.ones((12, 3)), np.ones(12), batch_size=4, verbose=0)
assert int(keras.ops.convert_to_numpy(loaded.optimizer.iterations.value)) == 4, "a step for each batch"
sys.exit("spark_elastic.tensorflow" in sys.modules)
"""


@pytest.mark.timeout(150)
def test_keras_on_torch_uses_the_torch_half(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "model.keras")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=140, env=environment)
    assert done.returncode == 0, done.stderr
