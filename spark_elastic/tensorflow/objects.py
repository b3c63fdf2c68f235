"""Horovod's further ways to hand objects and variables on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.objects import broadcast_object
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.tensorflow.gathering import broadcast_variables


def broadcast_object_fn(
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that hands an object of `root_rank` on. session: only None, as TensorFlow 2 has no sessions."""
    if session is not None:
        raise InvalidInput("there are no sessions in TensorFlow 2: leave session out.")
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Not of TensorFlow 2, whose eager variables are not global.

    Raises:
        InvalidInput: in eager mode.
    """
    if tf.executing_eagerly():
        raise InvalidInput(
            "TensorFlow 2 has no global variables: call broadcast_variables(model.variables, root_rank)."
        )
    broadcast_variables(tf.compat.v1.global_variables(), root_rank)
