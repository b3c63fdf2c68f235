"""Horovod's `size_op`, `rank_op` and the like, evaluated when a graph runs, maybe in another world than its trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.gradients import ranks
from spark_elastic.gradients.process_sets import ProcessSet, get_process_set
from spark_elastic.horovod.tensorflow.arrays import Tensor, call, no_autograph


@no_autograph
def size_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Tensor:
    """Return the number of ranks in the set. All functions here return scalar int32 tensors."""
    return _evaluate(_as_set(process_set_id).size)


@no_autograph
def rank_op(name: str | None = None) -> Tensor:
    """Return the rank of this process in the world."""
    return _evaluate(ranks.rank)


def rank_in(process_set: ProcessSet) -> Tensor:
    """Return the rank of this process in the set."""
    return _evaluate(process_set.rank)


@no_autograph
def local_size_op(name: str | None = None) -> Tensor:
    """Return the number of workers on this host."""
    return _evaluate(ranks.local_size)


@no_autograph
def local_rank_op(name: str | None = None) -> Tensor:
    """Return the rank of this process among the workers on this host."""
    return _evaluate(ranks.local_rank)


@no_autograph
def process_set_included_op(process_set_id: ProcessSet | int = 0, name: str | None = None) -> Tensor:
    """Return 1 if this process is in the set, else 0."""
    return _evaluate(_as_set(process_set_id).included)


def _evaluate(get: Callable[[], int]) -> Tensor:
    def body(arrays: list[Array]) -> list[Array]:
        return [np.array(int(get()), np.int32)]

    return call(body, [], [tf.int32], [[]])[0]


def _as_set(process_set: ProcessSet | int) -> ProcessSet:
    return process_set if isinstance(process_set, ProcessSet) else get_process_set(process_set)
