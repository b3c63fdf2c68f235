"""The contenders of `training_step.py --framework tensorflow`: a tf.function with SGD by hand, the same for all.

Alone, with `DistributedGradientTape`, and in a custom loop under MultiWorkerMirroredStrategy, which reduces the list of
gradients with the collectives of its own servers.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from elastic_collectives import Group

RATE = 1e-3


def addresses(size: int) -> list[str]:
    """Ports of this machine that are free now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    found = [f"127.0.0.1:{server.getsockname()[1]}" for server in held]
    for server in held:
        server.close()
    return found


class ComparedSteps:
    """Of one rank. The strategy's servers must be there before anything else is done with TensorFlow."""

    def __init__(self, rank: int, workers: list[str]) -> None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
        self._tf = tf
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def steps(self, layers: int, width: int, data: Any, group: Group) -> list[Callable[[], object]]:
        """(local, ours, the strategy's, one allreduce of all gradients)"""
        import spark_elastic.tensorflow as hvd

        tf = self._tf
        rows = tf.constant(data)
        draw = np.random.default_rng(1)
        first: list[Any] = []
        for _ in range(layers):
            weight = draw.normal(scale=width**-0.5, size=(width, width))
            first += [weight.astype(np.float32), np.zeros(width, np.float32)]

        def make_step(reduced: Callable[[Any, Any, list[Any]], Any]) -> Callable[[], object]:
            variables = [tf.Variable(array) for array in first]

            def step() -> None:
                with tf.GradientTape() as tape:
                    value = rows
                    for weight, bias in zip(variables[::2], variables[1::2], strict=True):
                        value = tf.nn.relu(value @ weight + bias)
                    loss = tf.reduce_mean(tf.square(value))
                for variable, gradient in zip(variables, reduced(tape, loss, variables), strict=True):
                    variable.assign_sub(RATE * gradient)

            return step

        def reduce_by_strategy(tape: Any, loss: Any, variables: list[Any]) -> Any:
            gradients = tape.gradient(loss, variables)
            mean = tf.distribute.ReduceOp.MEAN
            return tf.distribute.get_replica_context().all_reduce(mean, gradients)

        in_scope = make_step(reduce_by_strategy)
        placed = group.buffer(4 * sum(array.size for array in first)).view(np.float32)
        contenders = (
            make_step(lambda tape, loss, variables: tape.gradient(loss, variables)),
            make_step(
                lambda tape, loss, variables: hvd.DistributedGradientTape(tape).gradient(loss, variables)
            ),
            lambda: self._strategy.run(in_scope),
        )
        functions = [tf.function(contender, autograph=False) for contender in contenders]
        return [*functions, lambda: group.allreduce(placed)]
