"""Beyond `test_frameworks.py`: variables, slices, tapes, graphs, batch norm; states over worlds of threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.keras as hvd_keras
import spark_elastic.tensorflow as hvd
from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.horovod.tensorflow import operations
from spark_elastic.horovod.tensorflow.arrays import call, copy_arrays
from spark_elastic.runs.handlers import to_array
from tests.unit.handwritten.stage import Event, FakeDriver, FakeSession
from tests.worlds import Runner


def test_variables_objects_and_numbers_of_the_world(world: Runner) -> None:
    def work(group: Group) -> None:
        variable = tf.Variable([float(group.rank)])
        hvd.broadcast_variables([variable], root_rank=1)
        assert variable.numpy().tolist() == [1.0]
        assert hvd.broadcast_object_fn(0)([group.rank]) == [0]
        assert (hvd.size_op().numpy(), hvd.rank_op().numpy()) == (2, group.rank)
        x = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
        with tf.GradientTape() as tape:  # rows that are gathered of it are exchanged dense
            loss = tf.reduce_sum(tf.gather(hvd.alltoall(x), [0, 0]) * (group.rank + 1.0))
        assert tape.gradient(loss, x).numpy().tolist() == [[[2, 2], [4, 4]], [[0, 0], [0, 0]]][group.rank]

    world(2, work)


def test_a_tape_tells_local_gradients_from_those_that_were_exchanged(world: Runner) -> None:
    def work(group: Group) -> None:
        own, shared = tf.Variable(1.0), tf.Variable(1.0)
        with tf.GradientTape() as tape:
            loss = (own + shared) * (group.rank + 1.0)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
        tape.register_local_source(own)
        local, exchanged = tape.get_local_and_global_gradients(loss, [own, shared])
        assert [(source is own, gradient.numpy()) for source, gradient in local] == [(True, group.rank + 1)]
        assert [(source is shared, gradient.numpy()) for source, gradient in exchanged] == [(True, 1.5)]

    world(2, work)


def test_slices_keep_their_rows(world: Runner) -> None:
    def work(group: Group) -> None:
        rank = group.rank
        slices = tf.IndexedSlices(tf.fill([1, 2], rank + 1.0), tf.constant([rank]), tf.constant([3, 2]))
        summed = hvd.allreduce(slices, op=hvd.Sum)
        assert isinstance(summed, tf.IndexedSlices)
        assert tf.convert_to_tensor(summed).numpy()[:, 0].tolist() == [1, 2, 3]
        assert tf.convert_to_tensor(hvd.allreduce(slices)).numpy()[2, 0] == 1.0
        with pytest.raises(NotImplementedError, match="Average and Sum"):
            hvd.allreduce(slices, op=hvd.Min)
        for dtype in (tf.int8, tf.int32, tf.int64):  # truncated towards zero: -14 of one rank, 100 of each
            values = tf.constant([[-7 if rank == 0 else 0], [50]], dtype)
            whole = tf.IndexedSlices(values, tf.constant([0, 1]), tf.constant([2, 1]))
            average = hvd.allreduce(whole, prescale_factor=2.0)
            assert (average.values.dtype, average.values.numpy()[:, 0].tolist()) == (dtype, [-4, 100])

    world(3, work)


def test_tape_exchanges_gradients_within_its_process_set(world: Runner) -> None:
    def work(group: Group) -> None:
        rank = group.rank
        dense, table, own = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)
        unused = tf.Variable(0.0)
        for sparse_as_dense in (False, True):
            how = {"sparse_as_dense": sparse_as_dense, "gradient_predivide_factor": 2.0, "groups": 2}
            tape = hvd.DistributedGradientTape(tf.GradientTape(), **how)
            tape.register_local_source(own)
            with tape:
                row = tf.gather(table, [rank] * (rank + 1)) / (rank + 1)
                loss = tf.reduce_sum(dense * (rank + 1)) + tf.reduce_sum(row) * 2 + own * (rank + 1)
            sources = {"a": dense, "t": table, "o": own, "u": unused}
            got = tape.gradient(loss, sources, use_generic_names=sparse_as_dense)
            assert got["a"].numpy().tolist() == [1.5, 1.5]
            assert isinstance(got["t"], tf.IndexedSlices) is not sparse_as_dense
            if not sparse_as_dense:
                assert got["t"].indices.numpy().tolist() == [0, 1], "a row is listed twice"
            assert tf.convert_to_tensor(got["t"]).numpy().tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
            assert got["o"].numpy() == (rank + 1) / 2
            assert got["u"] is None

    world(2, work)


def test_wrong_arguments_are_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"wraps a tf\.GradientTape once"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))
    with pytest.raises(InvalidInput, match="Average, Sum or Adasum"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max)
    with pytest.raises(InvalidInput, match="tensors of string"):
        hvd.allreduce(tf.constant("a"))
    with pytest.raises(InvalidInput, match="jit_compile=False"):
        tf.function(hvd.allreduce, jit_compile=True)(tf.ones(2))


@pytest.mark.parametrize("module", [hvd, hvd_keras], ids=["tensorflow", "keras"])
def test_without_global_variables_broadcasting_them_is_a_runtime_error(module: Any) -> None:
    with pytest.raises(RuntimeError, match=r"no global variables.* broadcast_variables"):
        module.broadcast_global_variables(0)


def test_a_session_that_reads_a_broadcast_variable_broadcasts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "broadcast_all", lambda tensors, *how: [each + 6.0 for each in tensors])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("weight", initializer=1.0)
        (received,) = hvd.broadcast_([variable], 0)
        session.run(variable.initializer)
        assert session.run(received) == session.run(variable) == 7.0


def test_passes_without_some_gradients_add_up_by_variable() -> None:
    """Two experts of one shape, of which each pass takes one or both."""
    a, b = (tf.Variable(tf.zeros([2])) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    ones = tf.ones([2])
    for first, second in ((ones, None), (None, 2 * ones), (ones, ones), (None, ones)):
        optimizer.apply_gradients([(first, a), (second, b)])
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([-2, -2], [-4, -4])


def test_the_optimizers_of_one_graph_exchange_one_after_the_other() -> None:
    variables = [tf.Variable(tf.zeros([3])) for _ in range(2)]
    plain = [tf.keras.optimizers.SGD(1.0) for _ in variables]
    optimizers = [hvd.DistributedOptimizer(sgd, backward_passes_per_step=2) for sgd in plain]
    for optimizer, variable in zip(optimizers, variables, strict=True):
        optimizer.build([variable])

    @tf.function
    def step() -> None:
        for optimizer, variable in zip(optimizers, variables, strict=True):
            optimizer.apply_gradients([(tf.ones([3]), variable)])

    nodes = step.get_concrete_function().graph.get_operations()
    first, second = [each for each in nodes if each.type in ("If", "StatelessIf")]
    before, found = [second], set()
    while before:
        each = before.pop()
        found.add(each.name)
        before += [*each.control_inputs, *(tensor.op for tensor in each.inputs)]
    assert first.name in found


def test_an_error_within_a_graph_is_raised_to_its_caller() -> None:
    def raise_error(arrays: Any) -> Any:
        raise hvd.HorovodInternalError((1,), "rank 1 is gone")

    graph = tf.function(lambda x: call(raise_error, [x], [tf.float32], [[]])[0])
    outer = tf.function(lambda x: graph(x) + 1.0)
    backward = tf.function(tf.custom_gradient(lambda x: (x * 1.0, graph)))

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = backward(x)
        return tape.gradient(y, x)

    concrete = graph.get_concrete_function(tf.constant(1.0))
    for called in (graph, outer, concrete, gradient):
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 is gone"):
            called(tf.constant(1.0))
    wrong = tf.function(lambda x: tf.debugging.check_numerics(x / 0.0, "not a number"))
    with pytest.raises(tf.errors.InvalidArgumentError):
        wrong(tf.constant(1.0))


def test_memory_is_reused_only_after_all_arrays_in_it_are_gone() -> None:
    big = [np.ones(1 << 18, np.float32), np.ones(3, np.float32)]
    first, other = copy_arrays(big).views, copy_arrays(big).views
    address = first[1].ctypes.data
    assert address % 64 == 0
    assert other[1].ctypes.data != address
    del first
    assert copy_arrays(big).views[1].ctypes.data == address


ROWS = np.random.default_rng(3).normal(size=(7, 2, 3)) * [1.0, 5.0, 0.1] + [0.0, 100.0, 1.0]
MASK = np.arange(14).reshape(7, 2) % 3 > 0
WEIGHTS = np.random.default_rng(4).normal(size=(7, 2, 3))


@pytest.mark.parametrize("masked", [False, True])
def test_outputs_gradients_and_running_statistics_are_those_of_all_rows(world: Runner, masked: bool) -> None:
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

    for rank, (y, gradient, variance) in enumerate(world(2, work)):
        np.testing.assert_allclose(y, expected[0][parts[rank]], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(gradient, expected[1][parts[rank]], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(variance, whole.moving_variance.value.numpy(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, as it saves
def test_a_saved_model_loads_its_sync_batch_norm(tmp_path: Path) -> None:
    model = tf.keras.Sequential([tf.keras.Input((3,)), hvd.SyncBatchNormalization(fused=False)])
    model.save(tmp_path / "model.keras")
    assert type(tf.keras.models.load_model(tmp_path / "model.keras").layers[0]) is hvd.SyncBatchNormalization


STEPS = 8
keras = tf.keras


def keras_state(number: int) -> tuple[Any, Callable[[], None], Callable[[], list[Any]]]:
    """(state of a net of its own first weights, whose optimizer is not built; a step; all that replicas must share)"""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.layers[0].bias.assign([float(number)])
    optimizer = keras.optimizers.Adam(0.1 * (number + 1))

    def step() -> None:
        optimizer.apply([tf.ones((2, 1)), tf.ones(1)], model.trainable_variables)

    def read_all_values() -> list[Any]:
        return [to_array(variable).tolist() for variable in (*model.weights, *optimizer.variables)]

    return hvd.elastic.TensorFlowKerasState(model, optimizer, step=0), step, read_all_values


def make_plain_state(number: int) -> tuple[Any, Callable[[], None], Callable[[], list[Any]]]:
    values = float(number), tf.constant([1, 2], tf.int64), tf.ones(3, tf.bfloat16)
    variables = [tf.Variable(value) for value in values]

    def step() -> None:
        for variable in variables:
            variable.assign_add(tf.ones_like(variable))

    state = hvd.elastic.TensorFlowState(variables, step=0)
    return state, step, lambda: [variable.numpy().tolist() for variable in variables]


@pytest.mark.parametrize("make", [keras_state, make_plain_state])
def test_newcomers_and_survivors_hold_equal_values_after_a_sync(make: Callable[[int], Any]) -> None:
    stage = FakeDriver(2, (Event(2), Event(5, rank=0)))
    numbers = iter(range(100))

    def work(session: FakeSession) -> tuple[list[Any], int]:
        state, step, all_there_is = make(next(numbers))

        def loop(state: Any) -> tuple[list[Any], int]:
            for _ in stage.take_steps(state, STEPS):
                step()
                state.commit()
            return all_there_is(), state.step

        return elastic(loop, lambda: session)(state)

    results = stage.play(work)
    assert stage.sizes[:3] == [2, 3, 2]
    assert len(results) == 2
    assert all(result == results[0] for result in results)
    assert results[0][1] == STEPS


def test_a_state_without_model_or_optimizer_is_refused() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(InvalidInput, match="needs an optimizer"):
        hvd.elastic.TensorFlowKerasState(model)
    with pytest.raises(InvalidInput, match="is not built"):
        hvd.elastic.TensorFlowKerasState(model, keras.optimizers.SGD())
    with pytest.raises(InvalidInput, match="takes a list of variables"):
        hvd.elastic.TensorFlowState()
    one, other = (hvd.elastic.TensorFlowState([tf.Variable([1.0] * size)]) for size in (1, 2))
    with pytest.raises(InvalidInput, match="number 0 is of another shape"):
        other.continue_from(one)
