"""Tries the losses of a Keras model on parts of a batch, with a copy of the model. See `loss_scope`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.data.loader import StepRows
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.loss_scope import (
    STEP_ADVICE,
    TOLERANCE,
    TOLERANCE_16,
    PartLoss,
    Trial,
    check_loss_scope,
)
from spark_elastic.estimators.two_rows import copy_objects, transform_rows
from spark_elastic.estimators.validation import MODEL_FACTORY_LOCK
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.training.batch import Chunk, LocalBatch, join_chunks
from spark_elastic.training.keras.batching import BatchBuilder
from spark_elastic.training.keras.compiled import activity_by_row, widen
from spark_elastic.training.keras.step import RunningStats, make_dense, to_arrays
from spark_elastic.training.keras.trainer import ConnectedModel, KerasUserObjects
from spark_elastic.training.spec import TrainSpec


def check_keras_loss_scope(objects: KerasUserObjects, spec: TrainSpec) -> None:
    """Refuse losses that compare rows, those of layers also with loss_scope='step': these see the rows of one pass."""
    tries: list[_Tries] = []

    def prepare(rows: StepRows) -> Trial:
        tries.append(_Tries(objects, spec, rows))
        return tries[0].make_trial(tries[0].compute_losses)

    check_loss_scope(spec, "the model's loss", STEP_ADVICE, prepare)
    if tries and tries[0].model.losses:
        what, scope = "what a layer adds to the loss (add_loss)", spec.config.loss.loss_scope
        advice = f"return from the model what it compares, compare it in the loss, and {STEP_ADVICE}"
        loss = replace(spec.config.loss, loss_scope=None if scope == "step" else scope)
        spec = replace(spec, config=replace(spec.config, loss=loss))
        check_loss_scope(spec, what, advice, lambda _: tries[0].make_trial(tries[0].compute_added))


def connect_model(
    objects: KerasUserObjects, spec: TrainSpec, rows: StepRows
) -> tuple[Any, ConnectedModel, LocalBatch[Any]]:
    """A copy of the model, how it takes the columns, and the batch of these rows."""
    (transformation,) = copy_objects((objects.transformation,))
    rows = transform_rows(spec, transformation, rows)
    model = objects.model.load()
    found = ConnectedModel.of(model, spec, rows, transformed=transformation is not None)
    builder = BatchBuilder(spec.config, found.inputs, found.label_cols, objects.class_weight)
    return model, found, builder.build(rows)


class _Tries:
    """A copy of the model, and the rows that its losses are tried on, of outputs that it computed once."""

    def __init__(self, objects: KerasUserObjects, spec: TrainSpec, rows: StepRows) -> None:
        self._seed, self._dtype = spec.config.data.seed, objects.model.default_dtype
        with MODEL_FACTORY_LOCK, seeded_rng(self._seed), self._dtype():
            self.model, self._found, self._whole = connect_model(objects, spec, rows)
        self._outputs = keras.tree.flatten(self._found.outputs)
        sixteen = any(each.dtype.size == 2 for each in self._outputs)
        self._tolerance = TOLERANCE_16 if sixteen else TOLERANCE
        if spec.config.loss.loss_scope == "step":
            self._check_step()

    def make_trial(self, compute: Callable[[LocalBatch[Any], slice, bool], PartLoss]) -> Trial:
        def measure(part: slice, seed: int, moved: bool) -> PartLoss:
            with seeded_rng(self._seed, seed), self._dtype():
                return compute(self._whole.cut(part), part, moved)

        return Trial(measure, lambda: None, is_apart=True, tolerance=self._tolerance)

    def compute_losses(self, batch: LocalBatch[Any], part: slice, moved: bool) -> PartLoss:
        """What the model was compiled with."""
        factor, losses = tf.zeros(()), self._found.losses
        with tf.GradientTape() as tape:
            tape.watch(factor)
            outputs = [
                (each + float(moved) * tf.roll(way, 1, 0) + tf.cast(factor, each.dtype) * way)[part]
                for each, way in zip(self._outputs, map(_choose_direction, self._outputs), strict=True)
            ]
            labels, packed = map(self._found.structure.outputs, (list(batch.labels), outputs))
            total, _ = losses.total_of_outputs(labels, packed, batch.weights, [1.0] * losses.count)
        slope = tape.gradient(total, factor)
        return PartLoss(float(total), float(len(batch)), 0.0 if slope is None else float(slope))

    def compute_added(self, batch: LocalBatch[Any], part: slice, moved: bool) -> PartLoss:
        """What layers add to it."""
        trained, fraction = self.model.trainable_variables, len(batch) / len(self._whole)
        with tf.GradientTape() as tape:
            self._call_model(batch, training=False)
            total = self._found.losses.total_of_layers(len(batch), fraction)
        found = zip(make_dense(tape.gradient(total, trained)), trained, strict=True)
        slopes = [float(tf.reduce_sum(g * _choose_direction(v))) for g, v in found if g is not None]
        return PartLoss(float(total), fraction, sum(slopes))

    def _call_model(self, batch: LocalBatch[Any], *, training: bool) -> list[Any]:
        with activity_by_row(self.model, len(batch)):
            outputs = self.model(self._found.structure.inputs(list(batch.features)), training=training)
        return [widen(each) for each in to_arrays(keras.tree.flatten(outputs))]

    def _check_step(self) -> None:
        """Refuse what workers would compute in different ways without noticing: they would train on gradients of other
        outputs than the loss has seen, or each of another loss."""
        whole, stats, passes = self._whole, RunningStats(self.model), []
        with self._dtype():
            parts = (whole, whole.cut(slice(0, 2)))
            join_chunks([Chunk(len(part), self._call_model(part, training=False)) for part in parts])
            for _ in range(2):
                stats.begin(self._seed)
                passes.append(self._call_model(whole, training=True))
                stats.restore()
        trial = self.make_trial(self.compute_losses)
        values = [[trial.measure(slice(0, len(whole)), 0, False).total] for _ in range(2)]
        for (one, other), sentence in (
            (
                passes,
                "computes outputs again for their gradients, and the model returns others when it is called again: "
                "let its layers draw by a keras.random.SeedGenerator that they keep.",
            ),
            (
                values,
                "has each worker compute the loss of all rows, and the model's loss is another one when it is computed "
                "again: let a layer of the model draw random numbers, not the loss.",
            ),
        ):
            for a, b in zip(one, other, strict=True):
                if not np.allclose(a, b, rtol=self._tolerance, atol=self._tolerance, equal_nan=True):
                    raise InvalidInput(f"loss_scope='step' {sentence}")


def _choose_direction(tensor: Any) -> Any:
    """In which slopes are taken: one of each tensor, the same in every call."""
    return tf.random.stateless_normal(tensor.shape, (0, 0), dtype=tensor.dtype)
