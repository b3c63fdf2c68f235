"""What a collective raised inside of a TensorFlow graph, which knows it as an error of its own kind only.

A graph's call remembers what it raised; who runs the graph (`as_raised`) raises that, any call of a tf.function
included. No message is ever looked at. Written by TensorFlow's threads, read by the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import tensorflow as tf

from spark_elastic.worker.context import Floor, current, floor_of_process


@dataclass
class _Remembered:
    error: BaseException | None = None


def remember(error: BaseException) -> None:
    """The first one of a world is the cause of the others."""
    remembered = _remembered()
    if remembered.error is None:
        remembered.error = error


@contextmanager
def as_raised() -> Iterator[None]:
    """Inside, a graph whose collective failed raises what the collective raised (`CollectiveError`, `InvalidInput`)."""
    _remembered().error = None
    try:
        yield
    except tf.errors.OpError as error:
        remembered = _remembered()
        cause, remembered.error = remembered.error, None
        if cause is None:
            raise
        raise cause from error


def _remembered() -> _Remembered:
    """A world's own: what an earlier one raised is no cause in the next."""
    here = current()
    floor: Floor = floor_of_process() if here is None else here.floor
    return floor.shared("tensorflow failure", _Remembered)


def _raising(called: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(called)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():  # it becomes part of another graph
            return called(function, *args, **kwargs)
        with as_raised():
            return called(function, *args, **kwargs)

    return call


# TensorFlow offers no other place to raise an error of one's own to who calls a tf.function, `model.fit` included.
_Function = type(tf.function(lambda: None))
_Function.__call__ = _raising(_Function.__call__)
