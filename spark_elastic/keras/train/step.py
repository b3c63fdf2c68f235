"""One optimizer step of the whole world, in three parts that know nothing of each other: gradients, exchange, apply.

`StepTaker.take` either applies the step or leaves everything as it was and raises (R1, R3). Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastic_collectives import Group
from spark_elastic.keras.train.exchange import Exchange
from spark_elastic.keras.train.metrics import StepMetrics
from spark_elastic.keras.train.moving import Moving
from spark_elastic.keras.train.objective import Objective
from spark_elastic.keras.train.state import LearnerState
from spark_elastic.protocol.types import Position
from spark_elastic.training.apply_section import uninterrupted
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.share import Share
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.trailer import Trailer, Verdict, exchange

Array = npt.NDArray[Any]
Pack = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Structure:
    """How the model takes its inputs and what it returns: functions of lists in order."""

    inputs: Pack
    outputs: Pack


class Gradients:
    """Gradients of the step's loss over this rank's rows, as TensorFlow functions."""

    def __init__(self, model: Any, objective: Objective, structure: Structure, eager: bool) -> None:
        self._model, self._objective, self._structure = model, objective, structure
        self._variables = list(model.trainable_variables)
        graph = (lambda function: function) if eager else tf.function(reduce_retracing=True)
        self._scored = graph(self._score)
        self._with_gradients = graph(self._differentiate)

    def __call__(
        self, part: Share[Array], factors: Sequence[float]
    ) -> tuple[list[Array | None], list[Array], list[Any]]:
        """(gradients, losses: their weighted sum, then each, outputs) of a part of the rows."""
        gradients, losses, outputs = self._with_gradients(*self._arguments(part, factors))
        return [None if g is None else np.asarray(g) for g in gradients], _arrays(losses), _arrays(outputs)

    def score(self, part: Share[Array], factors: Sequence[float]) -> tuple[list[Array], list[Any]]:
        """(losses, outputs) as in validation."""
        losses, outputs = self._scored(*self._arguments(part, factors))
        return _arrays(losses), _arrays(outputs)

    def _arguments(self, part: Share[Array], factors: Sequence[float]) -> tuple[Any, ...]:
        weights = None if part.weights is None else tf.constant(part.weights)
        return (
            [tf.constant(array) for array in part.features],
            [tf.constant(array) for array in part.labels],
            weights,
            tf.constant(factors, tf.float64),
            tf.constant(len(part) / part.planned, tf.float64),
        )

    def _differentiate(self, inputs: Any, labels: Any, weights: Any, factors: Any, part: Any) -> Any:
        with tf.GradientTape() as tape:
            losses, outputs = self._forward(inputs, labels, weights, factors, part, training=True)
        gradients = tape.gradient(losses[0], self._variables)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        return dense, losses, outputs

    def _score(self, inputs: Any, labels: Any, weights: Any, factors: Any, part: Any) -> Any:
        return self._forward(inputs, labels, weights, factors, part, training=False)

    def _forward(
        self, inputs: Any, labels: Any, weights: Any, factors: Any, part: Any, *, training: bool
    ) -> tuple[list[Any], list[Any]]:
        outputs = self._model(self._structure.inputs(inputs), training=training)
        total, own = self._objective.total(self._structure.outputs(labels), outputs, weights, factors, part)
        return [total, *own], keras.tree.flatten(outputs)


class Apply:
    """The optimizer's step on means over the whole step's rows."""

    def __init__(self, model: Any, eager: bool) -> None:
        self._optimizer, self._variables = model.optimizer, list(model.trainable_variables)
        self._run = self._apply if eager else tf.function(self._apply)

    def __call__(self, means: Sequence[Array], present: Array) -> None:
        self._run(
            [
                tf.constant(mean, v.dtype) if there else None  # None: nobody had it (R8)
                for mean, there, v in zip(means, present, self._variables, strict=True)
            ]
        )

    def _apply(self, gradients: list[Any]) -> None:
        self._optimizer.apply(gradients, self._variables)


class StepTaker:
    """Takes steps on one state."""

    def __init__(
        self,
        spec: TrainSpec,
        model: Any,
        state: LearnerState,
        objective: Objective,
        structure: Structure,
        metrics: StepMetrics,
        ledger: Ledger,
    ) -> None:
        eager = bool(model.run_eagerly)
        self._spec, self._state, self._objective, self._metrics = spec, state, objective, metrics
        self._gradients, self._apply = Gradients(model, objective, structure, eager), Apply(model, eager)
        self._moving, self._ledger = Moving(model), ledger
        self._count = len(model.trainable_variables)
        variables = [*model.trainable_variables, *self._moving.variables]
        self._exchange = Exchange(
            [tuple(v.shape) for v in variables],
            [str(v.dtype) for v in variables],
        )

    def take(
        self,
        group: Group,
        share: Share[Array],
        version: int,
        after: Callable[[Verdict], Position],
        before_apply: Callable[[], None],
        ends: bool,
    ) -> Verdict:
        """See `training.learner.Learner.take`. ends: see `Trailer`.

        Raises:
            CollectiveError: the exchange broke; the state is as before the step.
            FloatingPointError: the loss is no number, and `terminate_on_nan`; likewise.
        """
        state, here = self._state, self._state.position
        self._moving.begin(self._spec.seed, here.epoch, here.phase, here.step, group.rank)
        try:
            factors = self._objective.factors(group, share)
            self._ledger.write_ahead(group.fence, here, share.row_ids)
            gradients, loss = self._backward(share, factors)
            moved, written = self._moving.moved(len(share) / share.planned)
            sums = self._exchange.summed(group, [*gradients, *moved], self._spec.wire)
            self._metrics.gather(group)
            there = np.array([*(g is not None for g in gradients), *written])
            hashed, rows = self._exchange.layout_hash, len(share)
            verdict = exchange(
                group,
                Trailer(here, version, hashed, rows, loss * share.planned, float(rows), there, ends=ends),
            )
            if self._spec.terminate_on_nan:
                verdict.check_finite(here)
        except BaseException:
            self._moving.restore()
            self._metrics.drop()
            raise
        with uninterrupted():
            before_apply()
            self._apply(sums[: self._count], verdict.present[: self._count])
            self._moving.apply(sums[self._count :], verdict.present[self._count :])
            self._metrics.commit()
            state.position = after(verdict)
            self._ledger.applied(group.fence, here, group.size)
        return verdict

    def evaluate(self, group: Group, share: Share[Array], version: int) -> Verdict:
        """One step of validation; the position stays."""
        here, loss = self._state.position, 0.0
        try:
            factors = self._objective.factors(group, share)
            for part in share.micro_batches(self._spec.val_batch_size or self._spec.batch_size):
                losses, outputs = self._gradients.score(part, factors)
                loss += float(losses[0])
                self._metrics.add(part, losses[1:], outputs)
            self._metrics.gather(group)
            trailer = Trailer(
                here, version, 0, len(share), loss * share.planned, float(len(share)), np.zeros(0, np.bool_)
            )
            verdict = exchange(group, trailer)
        except BaseException:
            self._metrics.drop()
            raise
        self._metrics.commit()
        return verdict

    def close(self) -> None:
        self._exchange.close()

    def _backward(self, share: Share[Array], factors: Sequence[float]) -> tuple[list[Array | None], float]:
        """Sums over this rank's rows; a rank without rows runs no forward (R8)."""
        total: list[Array | None] = [None] * self._count
        loss = 0.0
        for part in share.micro_batches(self._spec.batch_size):
            gradients, losses, outputs = self._gradients(part, factors)
            total = [
                g if t is None else t if g is None else t + g for t, g in zip(total, gradients, strict=True)
            ]
            loss += float(losses[0])
            self._metrics.add(part, losses[1:], outputs)
        return total, loss


def _arrays(tensors: Sequence[Any]) -> list[Array]:
    return [np.asarray(tensor) for tensor in tensors]
