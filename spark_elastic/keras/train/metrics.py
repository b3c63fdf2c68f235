"""The metrics that a Keras model was compiled with, exact however rows were shared out: all ranks see the whole step.

Rows travel once a step, in rank order, so that accumulators are equal everywhere; they are part of the state. Main
thread only; what a step gathered counts once `commit` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastic_collectives import Group
from spark_elastic.training.spec import Arrays, LocalBatch, MetricRows


class StepMetrics:
    """Of training or validation, one after the other: the accumulators are Keras's own.

    names: of the losses that are told one by one. pack: a list in the structure of the model's outputs.
    """

    def __init__(
        self, model: Any, names: Sequence[str], pack: Callable[[Sequence[Any]], Any], eager: bool
    ) -> None:
        self._names, self._pack = list(names), pack
        self._compiled = model._compile_metrics
        self._run = self._update if eager else tf.function(self._update, reduce_retracing=True)
        self._sums: dict[str, list[float]] = {}
        self._outputs = 0
        self._part = MetricRows()

    @property
    def variables(self) -> list[Any]:
        """The accumulators."""
        return [] if self._compiled is None else list(self._compiled.variables)

    @property
    def sums(self) -> dict[str, list[float]]:
        """(sum over rows, rows) of each loss; part of the state."""
        return self._sums

    @sums.setter
    def sums(self, sums: dict[str, list[float]]) -> None:
        self._sums = sums

    def build(self, labels: Any, outputs: Any) -> None:
        """labels, outputs: of one row, in the structure of the model's outputs."""
        self._outputs = len(keras.tree.flatten(outputs))
        if self._compiled is not None and not self._compiled.built:
            self._compiled.build(labels, outputs)

    def add(
        self, part: LocalBatch[npt.NDArray[Any]], losses: Sequence[npt.NDArray[Any]], outputs: Arrays
    ) -> None:
        """A part of this rank's rows. losses: each loss's own part of the step's."""
        logged = {name: float(loss) * part.planned for name, loss in zip(self._names, losses, strict=False)}
        weights = [] if part.weights is None else [part.weights]
        columns = None if self._compiled is None else [*map(_wide, [*outputs, *part.labels, *weights])]
        self._part.add(len(part), logged, columns)

    def gather(self, group: Group) -> None:
        """Exchange the step's rows; collective, also on a rank without rows."""
        if self._compiled is not None or self._names:
            self._part.gather(group)

    def discard(self) -> None:
        """Forget the rows of a step that was given up."""
        self._part.discard()

    def commit(self) -> None:
        """The step was applied: what was gathered counts."""
        told, columns = self._part.pop_gathered()
        for logged, rows in told:
            for name, total in logged.items():
                before = self._sums.get(name, [0.0, 0])
                self._sums[name] = [before[0] + total, before[1] + rows]
        if columns:
            self._run([tf.constant(column) for column in columns])

    def results(self) -> dict[str, Any]:
        """Of all rows since `reset`, by name."""
        found = {name: total / (rows or 1) for name, (total, rows) in self._sums.items()}
        if self._compiled is not None:
            found.update(
                {name: np.asarray(value).tolist() for name, value in self._compiled.result().items()}
            )
        return found

    def reset(self) -> None:
        self._sums = {}
        if self._compiled is not None:
            self._compiled.reset_state()

    def _update(self, columns: list[Any]) -> None:
        count = self._outputs
        labels, rest = columns[count : 2 * count], columns[2 * count :]
        self._compiled.update_state(
            self._pack(labels), self._pack(columns[:count]), sample_weight=rest[0] if rest else None
        )


def _wide(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """16-bit floats as float32, which numpy can write."""
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array
