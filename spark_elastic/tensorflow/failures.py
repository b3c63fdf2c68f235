"""What a collective raised inside of a TensorFlow graph, which knows it as an error of its own kind only.

A graph's call remembers what it raised, and whatever runs the graph raises that. No message is ever looked at. Written
by TensorFlow's threads, read by the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction

from spark_elastic.worker.context import Floor, current, floor_of_process


@dataclass
class _Remembered:
    error: BaseException | None = None


def remember(error: BaseException) -> None:
    """The first one of a world is the cause of the others."""
    remembered = _remembered()
    if remembered.error is None:
        remembered.error = error


def _remembered() -> _Remembered:
    """The error remembered in the current world: what an earlier world raised is no cause in the next."""
    here = current()
    floor: Floor = floor_of_process() if here is None else here.floor
    return floor.shared("tensorflow failure", _Remembered)


def _raising(call_flat: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call_flat)
    def call(function: Any, *args: Any) -> Any:
        if not tf.executing_eagerly():  # it becomes part of another graph
            return call_flat(function, *args)
        _remembered().error = None
        try:
            return call_flat(function, *args)
        except tf.errors.OpError as error:
            remembered = _remembered()
            cause, remembered.error = remembered.error, None
            if cause is None:
                raise
            raise cause from error

    return call


# Every graph that runs eagerly comes by here, whoever asked for it: a tf.function, `model.fit`, a ConcreteFunction, a
# tape's gradient. TensorFlow offers no place of its own to raise another error.
AtomicFunction.call_flat = _raising(AtomicFunction.call_flat)
