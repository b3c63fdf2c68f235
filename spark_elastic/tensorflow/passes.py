"""Gradients of several backward passes, summed in this process until there are as many as make a step.

Written by whoever runs the optimizer's graph, one at a time. What a world that is over left unfinished is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.ops.passes import PassCount
from spark_elastic.ops.process_sets import ProcessSet
from spark_elastic.tensorflow.arrays import Tensor, copies
from spark_elastic.tensorflow.calls import call


class Passes:
    """count: of passes in a step. average: divide their sum by it."""

    def __init__(self, count: int, average: bool) -> None:
        self._passes = PassCount(count)
        self._average = average
        self._sums: list[Array] = []

    @property
    def count(self) -> int:
        return self._passes.count

    def add(self, gradients: Sequence[Tensor], process_set: ProcessSet) -> tuple[Tensor, list[Tensor]]:
        """(whether the step is complete, then the sums; before, of no use)"""
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        given = [gradients[i] for i in there]
        results = call(
            self._added, given, [tf.bool, *(g.dtype for g in given)], [[], *(g.shape for g in given)]
        )
        summed = list(gradients)
        for i, result in zip(there, results[1:], strict=True):
            summed[i] = result
        return results[0], summed

    def _added(self, arrays: list[Array]) -> list[Array]:
        if self._passes.begin():
            self._sums, _ = copies(arrays)
        else:
            for whole, part in zip(self._sums, arrays, strict=True):
                whole += part
        if not self._passes.complete():
            return [np.array(False), *arrays]  # which nobody looks at
        results, self._sums = self._sums, []
        if self._average:
            for whole in results:
                whole /= self.count
        return [np.array(True), *results]
