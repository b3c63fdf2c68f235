"""States of Keras models and of variables over worlds of threads: newcomers take all, losses go back to a commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import spark_elastic.tensorflow as hvd
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.runs.handlers import to_array
from tests.unit.state.stage import Event, FakeDriver, FakeSession

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
            while state.step < STEPS:
                stage.reach_step(state.step)
                session.allreduce(np.ones(1))
                step()
                state.step += 1
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
