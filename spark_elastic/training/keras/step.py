"""One optimizer step of the whole world, as `training.trainer.ModelStep`.

With `loss_scope="step"` as in `training.torch.step`; what layers add (`add_loss`, penalties) stays a sum over passes.
Main thread only.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_collectives import Group
from spark_elastic.gradients.flat_allreduce import FlatAllreduce
from spark_elastic.gradients.step_summary import StepDecision, StepSummary
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.batch import Chunk, Column, LocalBatch, gather_columns
from spark_elastic.training.keras.compiled import (
    Array,
    Batch,
    CompiledLosses,
    CompiledMetrics,
    activity_by_row,
)
from spark_elastic.training.keras.state import SEED, KerasTrainingState, read_value
from spark_elastic.training.spec import FitConfig
from spark_elastic.training.trainer import ModelStep, Summarize, WorkClock, describe_dependent_layers


class RunningStats:
    """Variables that a forward pass writes, such as BatchNorm's statistics (R3, aborted forward). Each pass of a step
    begins with the values from before the step. A step that is applied adds to them the mean of what the passes
    changed, weighted by rows; of whole numbers and truth values, such as a layer's counter of steps, it takes the
    largest. Seeds of random layers follow from a key alone, so they need not be kept."""

    def __init__(self, model: Any) -> None:
        layers = model._flatten_layers()
        frozen = {id(v) for layer in layers if not layer.trainable for v in _list_unwritten(layer)}
        # Of metrics `CompiledMetrics` takes care, and of seeds `begin`.
        written = [v for v in model.non_trainable_weights if id(v) not in frozen]
        floats = [v for v in written if np.dtype(_numpy_dtype(v)).kind == "f"]
        # These a forward pass writes although they are trainable, or although their layer is frozen.
        kind = keras.layers.SpectralNormalization
        normalized = [v for each in layers if isinstance(each, kind) for v in (each.kernel, each.vector_u)]
        self.variables = list({id(v): v for v in [*floats, *normalized]}.values())
        self._counters = [v for v in written if np.dtype(_numpy_dtype(v)).kind in "iub"]
        self._seeds = [v for v in model.variables if v.path.endswith(SEED)]
        self._before: list[Array] = []  # of `variables` and `_counters`, before the step
        self._changes: list[Array | None] = []
        self._counts: list[Array] = []

    def begin(self, *key: int) -> None:
        """Keep the values as they are, and let random layers draw by `key` from here on."""
        self._before = [np.array(read_value(v)) for v in [*self.variables, *self._counters]]
        self._changes = [None] * len(self.variables)
        self._counts = self._before[len(self.variables) :]
        self.seed(*key)

    def seed(self, *key: int) -> None:
        for number, seed in enumerate(self._seeds):
            digest = hashlib.sha256(repr((*key, number)).encode()).digest()
            seed.assign(np.array([int.from_bytes(digest[:4], "little") >> 1, 0]))

    def end_pass(self, weight: float) -> None:
        """Take what a pass over `weight` of the step's rows changed, and put the values back."""
        for number, (variable, before) in enumerate(zip(self.variables, self._before, strict=False)):
            now = np.asarray(read_value(variable))
            if not np.array_equal(now, before):
                change, earlier = (now - before) * np.asarray(weight, before.dtype), self._changes[number]
                self._changes[number] = change if earlier is None else earlier + change
                variable.assign(before)
        counts = [np.asarray(read_value(v)) for v in self._counters]
        self._counts = [np.maximum(*pair) for pair in zip(self._counts, counts, strict=True)]
        for variable, before in zip(self._counters, self._before[len(self.variables) :], strict=True):
            variable.assign(before)

    def take_changes(self, group: Group) -> list[Array | None]:
        """This rank's part of each variable's change; None: the step has not changed it. Collective."""
        if self._counts:
            flat = np.concatenate([count.ravel() for count in self._counts]).astype(np.int64)
            group.allreduce(flat, op="max")
            ends = np.cumsum([count.size for count in self._counts])[:-1]
            parts = zip(np.split(flat, ends), self._counts, strict=True)
            self._counts = [part.reshape(count.shape).astype(count.dtype) for part, count in parts]
        return self._changes

    def restore(self) -> None:
        for variable, value in zip([*self.variables, *self._counters], self._before, strict=True):
            variable.assign(value)

    def apply(self, changes: list[Array], changed: Array) -> None:
        parts = zip(self.variables, self._before, changes, changed, strict=False)
        for variable, before, change, has_changed in parts:
            if has_changed:
                variable.assign(before + change)
        for variable, count in zip(self._counters, self._counts, strict=True):
            variable.assign(count)


def _list_unwritten(layer: Any) -> list[Any]:
    """Weights of a frozen layer that its forward pass leaves alone; one of the user's may go on to write its state."""
    is_keras = type(layer).__module__.startswith(("keras.", "keras_hub.", "keras_cv."))
    return [*layer._trainable_variables, *(layer._non_trainable_variables if is_keras else ())]


def describe_world_dependence(model: Any) -> str | None:
    """A sentence on the layers that make the weights depend on the number of workers (R9, scope of P2), or None."""
    return describe_dependent_layers(_dependent_layers(model))


def _dependent_layers(model: Any) -> Iterator[tuple[str, str]]:
    for layer in model._flatten_layers(include_self=False):
        if not layer.trainable:
            continue
        if type(layer).__name__ == "BatchNormalization":
            yield layer.name, "BatchNormalization: statistics of each worker's own rows"
        elif any(v.path.endswith(SEED) for v in layer.variables) and not list(layer._layers):
            # Cells of RNNs have a seed even if they drop nothing.
            rates = [getattr(layer, name, None) for name in ("dropout", "recurrent_dropout")]
            if rates != [0, 0]:
                yield layer.name, f"{type(layer).__name__}: random in each worker"


def _numpy_dtype(variable: Any) -> str:
    return "float32" if variable.dtype == "bfloat16" else str(variable.dtype)


Pack = Callable[[Sequence[Any]], Any]
Gradient = list[Array | None]  # by trainable variable


@dataclass(frozen=True)
class Structure:
    """How the inputs and outputs of a model are nested."""

    inputs: Pack  # from a list in order to the inputs as the model takes them
    outputs: Pack  # from a list in order to the structure of the outputs


class Gradients:
    """Gradients of the step's loss over this rank's rows, as TensorFlow functions."""

    def __init__(self, model: Any, losses: CompiledLosses, structure: Structure, eager: bool) -> None:
        self._model, self._losses, self._structure = model, losses, structure
        self._variables = list(model.trainable_variables)
        self._graph = (lambda function: function) if eager else tf.function(reduce_retracing=True)
        self._run_score = self._graph(partial(self._forward, training=False))
        self._run_gradients = self._graph(self._differentiate)

    def __call__(self, part: Batch, factors: Sequence[float]) -> tuple[Gradient, list[Array], list[Any]]:
        """(gradients, losses, outputs) of a part of the rows; first of the losses is their weighted sum."""
        gradients, losses, outputs = self._run_gradients(*self._arguments(part, factors))
        return to_arrays(gradients), to_arrays(losses), to_arrays(outputs)

    def score(self, part: Batch, factors: Sequence[float]) -> tuple[list[Array], list[Any]]:
        losses, outputs = self._run_score(*self._arguments(part, factors))
        return to_arrays(losses), to_arrays(outputs)

    def _arguments(self, part: Batch, factors: Sequence[float]) -> tuple[Any, ...]:
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
            scaled = self._model.optimizer.scale_loss(losses[0])  # by which the optimizer divides
        return make_dense(tape.gradient(scaled, self._variables)), losses, outputs

    def _forward(
        self, inputs: Any, labels: Any, weights: Any, factors: Any, part: Any, *, training: bool
    ) -> Any:
        outputs = self._call_model(inputs, training)
        total, own = self._losses.total(self._structure.outputs(labels), outputs, weights, factors, part)
        return [total, *own], keras.tree.flatten(outputs)

    def _call_model(self, inputs: Any, training: bool) -> Any:
        with activity_by_row(self._model, tf.shape(inputs[0])[0]):
            return self._model(self._structure.inputs(inputs), training=training)


def make_dense(gradients: Sequence[Any]) -> list[Any]:
    """As in a plain loop. Of an embedding's row that a batch has twice Keras lists two entries, and Adam and
    `global_clipnorm` square each of them: the result would depend on which rows share a batch. The sum does not."""
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


class TrainStep(ModelStep[Array]):
    _metrics: CompiledMetrics
    _make_gradients: type[Gradients] = Gradients

    def __init__(
        self,
        config: FitConfig,
        model: Any,
        state: KerasTrainingState,
        losses: CompiledLosses,
        structure: Structure,
        metrics: CompiledMetrics,
        ledger: Ledger,
    ) -> None:
        super().__init__(config, ledger)
        eager = bool(model.run_eagerly)
        self._state, self._losses, self._metrics = state, losses, metrics
        self._gradients = self._make_gradients(model, losses, structure, eager)
        self._optimizer, self._variables = model.optimizer, list(model.trainable_variables)
        self._run_optimizer = self._apply_gradients if eager else tf.function(self._apply_gradients)
        self._running_stats = RunningStats(model)
        self._count = len(model.trainable_variables)
        weights, stats = model.trainable_variables, self._running_stats.variables
        # Statistics, which float16 may not hold, travel uncompressed, and with the gradients if these do so, too.
        apart = bool(stats) and config.exchange.gradient_compression is not None
        parts = [weights, stats] if apart else [[*weights, *stats]]
        described = [([tuple(v.shape) for v in part], [str(v.dtype) for v in part]) for part in parts]
        self._exchanges = [FlatAllreduce(*each) for each in described]
        self._layout_hash = zlib.crc32(repr([each.layout_hash for each in self._exchanges]).encode())

    def _begin(self, rank: int) -> None:
        self._running_stats.begin(*self.key, rank)

    def _restore(self) -> None:
        self._running_stats.restore()

    def _exchange_sums(self, group: Group, batch: Batch, summarize: Summarize) -> StepSummary:
        self._ledger.write_ahead(group.fence, self._state.position, batch.row_ids)
        gradients, loss = self._backward(group, batch)
        worked = self.work.take()
        sent = [*gradients, *self._running_stats.take_changes(group)]
        self._sums = self._allreduce(group, sent)
        self._metrics.gather(group)
        present, layout = np.array([each is not None for each in sent]), self._layout_hash
        sums = {"loss": loss * batch.planned, "denominator": float(len(batch))}
        return summarize(layout=layout, present=present, seconds=worked, **sums)

    def _apply(self, decision: StepDecision, planned: int) -> None:
        present, count = decision.present, self._count
        sums, self._sums = self._sums, []
        self._running_stats.apply(sums[count:], present[count:])  # the optimizer begins at the former weights
        means = zip(sums[:count], present[:count], self._variables, strict=True)
        # None: no rank had it (R8, weighting)
        self._run_optimizer([tf.constant(mean, v.dtype) if exists else None for mean, exists, v in means])

    def _apply_gradients(self, gradients: list[Any]) -> None:
        self._optimizer.apply(gradients, self._variables)

    def compute_loss(self, group: Group, batch: Batch) -> tuple[float, float]:
        """Loss and denominator of rows of validation, which it adds to the metrics."""
        factors, loss = self._losses.factors(group, batch), 0.0
        for part in batch.micro_batches(self._config.data.validation_batch):
            losses, outputs = self._gradients.score(part, factors)
            loss += float(losses[0])
            self._metrics.add(part, losses[1:], outputs)
        return loss * batch.planned, float(len(batch))

    def close(self) -> None:
        for exchange in self._exchanges:
            exchange.close()

    def _allreduce(self, group: Group, sent: Sequence[Array | None]) -> list[Array]:
        first, *rest = self._exchanges
        end = self._count if rest else len(sent)
        sums = first.allreduce(group, sent[:end], self._config.exchange.gradient_compression)
        return [*sums, *(each for stats in rest for each in stats.allreduce(group, sent[end:], None))]

    def _backward(self, group: Group, batch: Batch) -> tuple[Gradient, float]:
        """(gradients, loss) summed over this rank's rows; a rank without rows runs no forward pass (R8, weighting)."""
        total: Gradient = [None] * self._count
        factors, loss = self._losses.factors(group, batch), 0.0
        for part in batch.micro_batches(self._config.data.batch_size):
            gradients, losses, outputs = self._gradients(part, factors)
            self._running_stats.end_pass(len(part) / part.planned)
            total = add_gradients(total, gradients)
            loss += float(losses[0])
            self._metrics.add(part, losses[1:], outputs)
        return total, loss


def add_gradients(total: Sequence[Array | None], more: Sequence[Array | None]) -> Gradient:
    return [g if t is None else t if g is None else t + g for t, g in zip(total, more, strict=True)]


def to_arrays(tensors: Sequence[Any]) -> list[Any]:
    return [None if tensor is None else np.asarray(tensor) for tensor in tensors]


# ---- the loss of all rows of a step


class StepGradients(Gradients):
    """A step: `run` each part of this rank's rows, `compute_loss` of all rows, then `pull` each part back."""

    def __init__(self, model: Any, losses: CompiledLosses, structure: Structure, eager: bool) -> None:
        super().__init__(model, losses, structure, eager)
        self._run_model = self._graph(self._compute_outputs)
        self._run_loss = self._graph(self._compute_loss)
        self._pulls: list[tuple[Any, bool]] = []  # by each output of all rows, and whether by row

    def run(self, part: Batch, *, training: bool) -> tuple[Any, list[Any]]:
        """(what layers add to the step's loss, outputs) of a part of the rows."""
        inputs, *_, fraction = self._arguments(part, ())
        added, outputs = self._run_model(inputs, fraction, training)
        self._dtypes = [each.dtype for each in outputs]
        return added, outputs

    def compute_loss(self, columns: Sequence[Column], own: Batch, *, training: bool) -> list[Array]:
        """The losses of all rows, and their gradients if `training`. columns: outputs, labels, and weights."""
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

    def pull(self, tape: Any, added: Any, outputs: Sequence[Any], rows: slice) -> Gradient:
        """Gradients by the weights of what `run` returned under the tape. rows: where these are among the step's."""
        targets, pulls = [added], [self._model.optimizer.scale_loss(tf.ones_like(added))]
        for output, (gradient, by_row) in zip(outputs, self._pulls, strict=True):
            if gradient is not None and (by_row or rows.start == 0):  # what all rows share has it once
                targets.append(output)
                pulls.append(gradient[rows] if by_row else gradient)
        return to_arrays(make_dense(tape.gradient(targets, self._variables, pulls)))

    def _compute_outputs(self, inputs: Any, part: Any, training: bool) -> tuple[Any, list[Any]]:
        outputs = self._call_model(inputs, training)
        return self._losses.total_of_layers(tf.shape(inputs[0])[0], part), keras.tree.flatten(outputs)

    def _compute_loss(self, outputs: Any, labels: Any, weights: Any, factors: Any, training: bool) -> Any:
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

    def _backward(self, group: Group, batch: Batch) -> tuple[Gradient, float]:
        """Two graphs are never in memory together, so all parts but the newest take a second forward pass."""
        parts = list(enumerate(batch.micro_batches(self._config.data.batch_size)))
        chunks, loss = [], 0.0
        for number, part in parts:
            self._running_stats.seed(*self.key, group.rank, number)
            with tf.GradientTape() if number == len(parts) - 1 else nullcontext() as tape:
                added, outputs = self._gradients.run(part, training=True)
            self._running_stats.end_pass(len(part) / part.planned)
            loss += float(added)
            chunks.append(self._take(part, outputs))
        first, of_all = self._compute_of_all(group, batch, chunks, self.work)
        total: Gradient = [None] * self._count
        past = first + len(batch)
        for number, part in reversed(parts):
            if number < len(parts) - 1:
                self._running_stats.seed(*self.key, group.rank, number)
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
        arrays = to_arrays(outputs)
        self._metrics.add(part, (), arrays)
        weights = [] if part.weights is None else [part.weights]
        return Chunk(len(part), [read_value(column) for column in (*arrays, *part.labels, *weights)])

    def _compute_of_all(
        self, group: Group, batch: Batch, chunks: list[Chunk], work: WorkClock | None = None
    ) -> tuple[int, float]:
        """Where this rank's rows begin, and the losses of all rows on the rank that reports them. Collective.
        work: measures a step of training; None: no gradient is wanted."""
        columns, first, reports = gather_columns(group, chunks, None if work is None else work.pause())
        losses = self._gradients.compute_loss(columns, batch, training=work is not None) if chunks else []
        if not reports:
            return first, 0.0
        self._metrics.add_losses(losses[1:], batch.planned, batch.planned)
        return first, float(losses[0])
