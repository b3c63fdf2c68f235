"""Python that runs where tensors are: at once in eager mode, as one `tf.numpy_function` inside of a graph.

Calls of one graph run in the order in which they were traced, so that unnamed operations pair up. What one raises is
remembered for whoever runs the graph (`failures`). Traced by the training thread, run by TensorFlow's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.tensorflow.arrays import Tensor, for_tensor, view_of
from spark_elastic.tensorflow.failures import remember

Body: TypeAlias = Callable[[list[Array]], Sequence[Array]]
F = TypeVar("F", bound=Callable[..., Any])
LAST = "_spark_elastic_last"  # on a graph: its newest call


def unconverted(function: F) -> F:
    """Autograph, which rewrites what a tf.function calls, leaves it and what it calls as they are."""
    left: F = tf.autograph.experimental.do_not_convert(function)
    return left


@unconverted
def call(body: Body, tensors: Sequence[Tensor], dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[Tensor]:
    """The results of `body`, of these dtypes and static shapes. It must neither write into the arrays that it
    is given nor return them: TensorFlow may write into what it gets.

    Raises:
        InvalidInput: it is being compiled by XLA.
    """
    if tf.executing_eagerly():
        results = body([view_of(tensor) for tensor in tensors])
        return [
            tf.convert_to_tensor(for_tensor(array, dtype))
            for array, dtype in zip(results, dtypes, strict=True)
        ]
    graph = tf.compat.v1.get_default_graph()
    if GraphOrParentsInXlaContext(graph):
        raise InvalidInput(
            "XLA cannot compile an exchange between workers: pass jit_compile=False to model.compile() or tf.function."
        )
    former = getattr(graph, LAST, None)
    with tf.control_dependencies([] if former is None else [former]):
        made = tf.numpy_function(_guarded(body, dtypes), list(tensors), list(dtypes))
    setattr(graph, LAST, made[0].op)
    for result, shape in zip(made, shapes, strict=True):
        result.set_shape(shape)
    return list(made)


def _guarded(body: Body, dtypes: Sequence[Any]) -> Callable[..., list[Array]]:
    def guarded(*arrays: Array) -> list[Array]:
        try:
            results = body(list(arrays))
        except BaseException as error:
            remember(error)
            raise
        return [for_tensor(array, dtype) for array, dtype in zip(results, dtypes, strict=True)]

    return unconverted(guarded)
