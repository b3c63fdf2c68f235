"""The loss of all rows of a step, whatever the world: `loss_scope="step"` (R8, weighting; R9, scope of P2).

Each rank computes the losses of all rows (`training.step_columns`), and their gradient by its own outputs, which its
backward passes carry on to the weights (GradCache). What layers add (`add_loss`, penalties) stays a sum over
passes. Main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_collectives import Group
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.keras.compiled import CompiledLosses, widen
from spark_elastic.training.keras.step import (
    Array,
    Gradients,
    Structure,
    TrainStep,
    add_gradients,
    make_dense,
    to_arrays,
)
from spark_elastic.training.step_columns import Chunk, Column, gather_columns
from spark_elastic.training.trainer import WorkClock

Batch = LocalBatch[Array]


class StepGradients(Gradients):
    """A step: `run` each part of this rank's rows, `compute_loss` of all rows, then `pull` each part back."""

    def __init__(self, model: Any, losses: CompiledLosses, structure: Structure, eager: bool) -> None:
        super().__init__(model, losses, structure, eager)
        self._run_model = self._graph(self._compute_outputs)
        self._run_loss = self._graph(self._compute_loss)
        # After `compute_loss`: the gradient by each output of all rows, and whether it has an entry for each row.
        self._pulls: list[tuple[Any, bool]] = []

    def run(self, part: Batch, *, training: bool) -> tuple[Any, list[Any]]:
        """(what layers add to the step's loss, outputs) of a part of the rows."""
        inputs, *_, fraction = self._arguments(part, ())
        added, outputs = self._run_model(inputs, fraction, training)
        self._dtypes = [each.dtype for each in outputs]
        return added, outputs

    def compute_loss(self, columns: Sequence[Column], own: Batch, *, training: bool) -> list[Array]:
        """The losses of all rows of the step, as `score` has them, and their gradients if `training`.

        Args:
            columns: outputs, labels, and weights.
            own: this rank's rows.
        """
        count = len(self._dtypes)
        outputs, given = columns[:count], [column.values for column in columns[count:]]
        weights = None if own.weights is None else given.pop().astype(own.weights.dtype)
        labels = tuple(each.astype(mine.dtype) for each, mine in zip(given, own.labels, strict=True))
        whole = LocalBatch(own.planned, np.arange(len(labels[0])), (), labels, weights)
        _, *arguments, _ = self._arguments(whole, self._losses.factors(None, whole))
        tensors = [tf.cast(each.values, dtype) for each, dtype in zip(outputs, self._dtypes, strict=True)]
        losses, gradients = self._run_loss(tensors, *arguments, training)
        self._pulls = [(each, out.by_row) for each, out in zip(gradients, outputs, strict=False)]
        return to_arrays(losses)

    def pull(self, tape: Any, added: Any, outputs: Sequence[Any], rows: slice) -> list[Array | None]:
        """Gradients by the weights of what `run` returned under the tape. rows: where these are among the step's."""
        targets, pulls = [added], [self._model.optimizer.scale_loss(tf.ones_like(added))]
        for output, (gradient, by_row) in zip(outputs, self._pulls, strict=True):
            # What all rows share has its gradient once.
            if gradient is not None and (by_row or rows.start == 0):
                targets.append(output)
                pulls.append(gradient[rows] if by_row else gradient)
        return to_arrays(make_dense(tape.gradient(targets, self._variables, pulls)))

    def _compute_outputs(self, inputs: Any, part: Any, training: bool) -> tuple[Any, list[Any]]:
        outputs = self._call_model(inputs, training)
        return self._losses.total_of_layers(tf.shape(inputs[0])[0], part), keras.tree.flatten(outputs)

    def _compute_loss(
        self, outputs: list[Any], labels: Any, weights: Any, factors: Any, training: bool
    ) -> tuple[list[Any], list[Any]]:
        pack = self._structure.outputs
        sources = {place: each for place, each in enumerate(outputs) if each.dtype.is_floating}
        with tf.GradientTape() as tape:
            tape.watch(sources)
            total, own = self._losses.total_of_outputs(pack(labels), pack(outputs), weights, factors)
            scaled = self._model.optimizer.scale_loss(total)
        found = tape.gradient(scaled, sources) if training else {}
        return [total, *own], make_dense([found.get(place) for place in range(len(outputs))])


class StepLossStep(TrainStep):
    """Takes steps whose loss is of all their rows."""

    _gradients: StepGradients
    _make_gradients = StepGradients

    def _backward(self, group: Group, batch: Batch) -> tuple[list[Array | None], float]:
        """(gradients, loss), as in `TrainStep`. The graphs of two parts are never in memory together, so all but the
        newest part take a second forward pass."""
        parts = list(enumerate(batch.micro_batches(self._config.data.batch_size)))
        chunks, loss = [], 0.0
        for number, part in parts:
            self._running_stats.seed(*self._key, group.rank, number)
            with tf.GradientTape() if number == len(parts) - 1 else nullcontext() as tape:
                added, outputs = self._gradients.run(part, training=True)
            self._running_stats.end_pass(len(part) / part.planned)
            loss += float(added)
            chunks.append(self._take(part, outputs))
        first, of_all = self._compute_of_all(group, batch, chunks, self.work)
        total: list[Array | None] = [None] * self._count
        past = first + len(batch)
        for number, part in reversed(parts):
            if number < len(parts) - 1:
                self._running_stats.seed(*self._key, group.rank, number)
                with tf.GradientTape() as tape:
                    added, outputs = self._gradients.run(part, training=True)
                self._running_stats.restore()
            past, rows = past - len(part), slice(past - len(part), past)
            total = add_gradients(total, self._gradients.pull(tape, added, outputs, rows))
        return total, loss + of_all

    def compute_loss(self, group: Group, batch: Batch) -> tuple[float, float]:
        chunks, loss = [], 0.0
        for part in batch.micro_batches(self._config.data.validation_batch):
            added, outputs = self._gradients.run(part, training=False)
            loss += float(added)
            chunks.append(self._take(part, outputs))
        loss += self._compute_of_all(group, batch, chunks)[1]
        return loss * batch.planned, float(len(batch))

    def _take(self, part: Batch, outputs: Sequence[Any]) -> Chunk:
        """The outputs of a part, which it adds to the metrics."""
        arrays = to_arrays(outputs)
        self._metrics.add(part, (), arrays)
        weights = [] if part.weights is None else [part.weights]
        return Chunk(len(part), [widen(column) for column in (*arrays, *part.labels, *weights)])

    def _compute_of_all(
        self, group: Group, batch: Batch, chunks: Sequence[Chunk], work: WorkClock | None = None
    ) -> tuple[int, float]:
        """Where this rank's rows begin among those of the step, and the losses of all of them on the rank that reports
        them; else 0. Collective. work: measures a step of training; None: no gradient is wanted."""
        columns, first, reports = gather_columns(group, chunks, work)
        losses = self._gradients.compute_loss(columns, batch, training=work is not None) if chunks else []
        if not reports:
            return first, 0.0
        self._metrics.add_losses(losses[1:], batch.planned, batch.planned)
        return first, float(losses[0])
