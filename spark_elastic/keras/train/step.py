"""One optimizer step of the whole world, in three parts that know nothing of each other: gradients, exchange, apply.

`TrainStep.take` either applies the step or leaves everything as it was and raises (R1, R3). Main thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastic_collectives import Group
from spark_elastic.keras.train.metrics import StepMetrics
from spark_elastic.keras.train.objective import CompiledLosses
from spark_elastic.keras.train.state import KerasTrainingState, value_of
from spark_elastic.ops.flat_allreduce import FlatAllreduce
from spark_elastic.protocol.types import Position
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.spec import LocalBatch
from spark_elastic.training.step_summary import StepDecision, StepSummary, exchange_summaries
from spark_elastic.training.trainer import defer_interrupts, describe_dependent_layers

Array = npt.NDArray[Any]


# What a forward pass changes besides gradients: running statistics and seeds (R3, R9). Main thread only.


_SEED = "seed_generator_state"


class RunningStats:
    """Variables that layers themselves write, such as BatchNorm's statistics.

    They are averaged over the ranks by rows, and put back where a step is given up. Seeds of random layers follow from
    a key alone, so that nothing of them need be kept.
    """

    def __init__(self, model: Any) -> None:
        frozen = {id(v) for layer in model._flatten_layers() if not layer.trainable for v in layer.weights}
        self.variables = [
            v
            for v in model.non_trainable_variables
            if id(v) not in frozen and np.dtype(_numpy_dtype(v)).kind == "f" and not v.path.endswith(_SEED)
        ]
        self._seeds = [v for v in model.variables if v.path.endswith(_SEED)]
        self._before: list[Array] = []

    def begin(self, *key: int) -> None:
        """Keep what there is, and draw by `key` from here on."""
        self._before = [np.array(value_of(v)) for v in self.variables]
        for number, seed in enumerate(self._seeds):
            drawn = hashlib.sha256(repr((*key, number)).encode()).digest()
            seed.assign(np.array([int.from_bytes(drawn[:4], "little") >> 1, 0]))

    def weighted_values(self, weight: float) -> tuple[list[Array | None], list[bool]]:
        """Each variable times this rank's share of the step's rows, and whether it was written to."""
        now = [np.asarray(value_of(v)) for v in self.variables]
        written = [not np.array_equal(a, b) for a, b in zip(now, self._before, strict=True)]
        return [value * np.asarray(weight, value.dtype) if weight else None for value in now], written

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._before, strict=True):
            variable.assign(value)

    def apply(self, means: list[Array], written: Array) -> None:
        for variable, mean, changed in zip(self.variables, means, written, strict=True):
            if changed:
                variable.assign(mean)


def describe_world_dependence(model: Any) -> str | None:
    """R9: one sentence that names the layers that make the weights depend on the number of workers, or None."""
    return describe_dependent_layers(_dependent(model))


def _dependent(model: Any) -> Iterator[tuple[str, str]]:
    for layer in model._flatten_layers(include_self=False):
        if not layer.trainable:
            continue
        if type(layer).__name__ == "BatchNormalization":
            yield layer.name, "BatchNormalization: statistics of each worker's own rows"
        elif any(v.path.endswith(_SEED) for v in layer.variables) and not list(layer._layers):
            yield layer.name, f"{type(layer).__name__}: random in each worker"


def _numpy_dtype(variable: Any) -> str:
    return "float32" if variable.dtype == "bfloat16" else str(variable.dtype)


Pack = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Structure:
    """How the model takes its inputs and what it returns: functions of lists in order."""

    inputs: Pack
    outputs: Pack


class Gradients:
    """Gradients of the step's loss over this rank's rows, as TensorFlow functions."""

    def __init__(self, model: Any, objective: CompiledLosses, structure: Structure, eager: bool) -> None:
        self._model, self._objective, self._structure = model, objective, structure
        self._variables = list(model.trainable_variables)
        graph = (lambda function: function) if eager else tf.function(reduce_retracing=True)
        self._scored = graph(self._score)
        self._with_gradients = graph(self._differentiate)

    def __call__(
        self, part: LocalBatch[Array], factors: Sequence[float]
    ) -> tuple[list[Array | None], list[Array], list[Any]]:
        """(gradients, losses: their weighted sum, then each, outputs) of a part of the rows."""
        gradients, losses, outputs = self._with_gradients(*self._arguments(part, factors))
        return [None if g is None else np.asarray(g) for g in gradients], _arrays(losses), _arrays(outputs)

    def score(self, part: LocalBatch[Array], factors: Sequence[float]) -> tuple[list[Array], list[Any]]:
        """(losses, outputs) as in validation."""
        losses, outputs = self._scored(*self._arguments(part, factors))
        return _arrays(losses), _arrays(outputs)

    def _arguments(self, part: LocalBatch[Array], factors: Sequence[float]) -> tuple[Any, ...]:
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


class TrainStep:
    """Takes steps on one state."""

    def __init__(
        self,
        config: FitConfig,
        model: Any,
        state: KerasTrainingState,
        objective: CompiledLosses,
        structure: Structure,
        metrics: StepMetrics,
        ledger: Ledger,
    ) -> None:
        eager = bool(model.run_eagerly)
        self._config, self._state, self._objective, self._metrics = config, state, objective, metrics
        self._gradients, self._apply = Gradients(model, objective, structure, eager), Apply(model, eager)
        self._moving, self._ledger = RunningStats(model), ledger
        self._count = len(model.trainable_variables)
        variables = [*model.trainable_variables, *self._moving.variables]
        self._exchange = FlatAllreduce(
            [tuple(v.shape) for v in variables],
            [str(v.dtype) for v in variables],
        )

    def run(
        self,
        group: Group,
        share: LocalBatch[Array],
        version: int,
        after: Callable[[StepDecision], Position],
        before_apply: Callable[[], None],
        ends: bool,
    ) -> StepDecision:
        """See `training.trainer.ModelTrainer.take`. ends: see `StepSummary`.

        Raises:
            CollectiveError: the exchange broke; the state is as before the step.
            FloatingPointError: the loss is no number, and `terminate_on_nan`; likewise.
        """
        state, here = self._state, self._state.position
        self._moving.begin(self._config.seed, here.epoch, here.phase, here.step, group.rank)
        try:
            factors = self._objective.factors(group, share)
            self._ledger.write_ahead(group.fence, here, share.row_ids)
            gradients, loss = self._backward(share, factors)
            moved, written = self._moving.weighted_values(len(share) / share.planned)
            sums = self._exchange.allreduce(group, [*gradients, *moved], self._config.gradient_compression)
            self._metrics.gather(group)
            there = np.array([*(g is not None for g in gradients), *written])
            hashed, rows = self._exchange.layout_hash, len(share)
            decision = exchange_summaries(
                group,
                StepSummary(here, version, hashed, rows, loss * share.planned, float(rows), there, ends=ends),
            )
            if self._config.terminate_on_nan:
                decision.check_finite(here)
        except BaseException:
            self._moving.restore()
            self._metrics.discard()
            raise
        with defer_interrupts():
            before_apply()
            self._apply(sums[: self._count], decision.present[: self._count])
            self._moving.apply(sums[self._count :], decision.present[self._count :])
            self._metrics.commit()
            state.position = after(decision)
            self._ledger.record_applied(group.fence, here, group.size)
        return decision

    def validate(self, group: Group, share: LocalBatch[Array], version: int) -> StepDecision:
        """One step of validation; the position stays."""
        here, loss = self._state.position, 0.0
        try:
            factors = self._objective.factors(group, share)
            for part in share.micro_batches(self._config.validation_batch):
                losses, outputs = self._gradients.score(part, factors)
                loss += float(losses[0])
                self._metrics.add(part, losses[1:], outputs)
            self._metrics.gather(group)
            trailer = StepSummary(
                here, version, 0, len(share), loss * share.planned, float(len(share)), np.zeros(0, np.bool_)
            )
            decision = exchange_summaries(group, trailer)
        except BaseException:
            self._metrics.discard()
            raise
        self._metrics.commit()
        return decision

    def close(self) -> None:
        self._exchange.close()

    def _backward(
        self, share: LocalBatch[Array], factors: Sequence[float]
    ) -> tuple[list[Array | None], float]:
        """Sums over this rank's rows; a rank without rows runs no forward (R8)."""
        total: list[Array | None] = [None] * self._count
        loss = 0.0
        for part in share.micro_batches(self._config.batch_size):
            gradients, losses, outputs = self._gradients(part, factors)
            total = [
                g if t is None else t if g is None else t + g for t, g in zip(total, gradients, strict=True)
            ]
            loss += float(losses[0])
            self._metrics.add(part, losses[1:], outputs)
        return total, loss


def _arrays(tensors: Sequence[Any]) -> list[Array]:
    return [np.asarray(tensor) for tensor in tensors]
