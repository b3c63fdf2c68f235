"""The losses and metrics that a Keras model was compiled with, for steps whose rows are split over workers.

Losses are sums over rows (R8, weighting). Metrics get the rows of the whole step, in rank order; their accumulators are
equal everywhere and part of the state. Main thread only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.training.batch import Arrays, LocalBatch, StepMetrics
from spark_elastic.training.keras.state import read_value

Array = npt.NDArray[Any]
Batch = LocalBatch[Array]
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_CLASSES = "whole numbers of classes: number them from 0, or give categorical_crossentropy their shares"
_TRUTHS = "labels from 0 to 1: number the classes 0 and 1"
_BINARY = keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy
Total = tuple[Any, list[Any]]  # a sum of losses, and each of them


@dataclass(frozen=True)
class _OutputLoss:
    path: tuple[Any, ...]  # keys that lead to the output in the structure of the model's outputs
    loss: Any  # a Keras loss without reduction
    weight: float  # its weight in the sum of the losses
    name: str  # as Keras names it; the history has it as NAME_loss
    reduction: str  # the reduction that the user chose
    ignored: int | None  # the class whose labels do not count, as Keras's ignore_class; None: all count
    place: int  # which of the outputs it is, in their order

    @property
    def of_classes(self) -> bool:
        """Whether its labels are numbers of classes; Keras would cut 0.5 down to 0."""
        return getattr(getattr(self.loss, "fn", None), "__name__", "") == "sparse_categorical_crossentropy"

    @property
    def is_binary(self) -> bool:
        return getattr(self.loss, "fn", None) in _BINARY

    def find_divisor(self, batch: Batch) -> float | None:
        """What these rows add to the divisor of the mean; None: it does not depend on what is in the rows."""
        weighted = self.reduction == "mean_with_sample_weight" and batch.weights is not None
        if self.reduction == "sum" or not (weighted or self.ignored is not None):
            return None
        counted = np.ones((len(batch), 1))
        if self.ignored is not None:
            labels = batch.labels[self.place]
            counted = (labels != self.ignored).reshape(len(batch), math.prod(labels.shape[1:]))
        if weighted:
            assert batch.weights is not None
            counted = counted * batch.weights.astype(np.float64)[:, None]
        return float(counted.sum())


class CompiledLosses:
    """Losses of one model, computed without reduction: the sums are divided by what all ranks have."""

    def __init__(self, model: Any, labels: Any, outputs: Any, label_cols: Sequence[str] = ()) -> None:
        """labels, outputs: of one row. label_cols: in the order of the outputs, for errors.
        Raises InvalidInput: the loss does not fit the outputs, or an output carries a mask."""
        self._model, self._label_cols = model, label_cols
        compiled = model._compile_loss
        if not compiled.built:
            try:
                compiled.build(labels, outputs)
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidInput(f"the loss does not fit the model's outputs: {error}") from error
        self._dtype = compiled.dtype
        places = keras.tree.pack_sequence_as(outputs, list(range(len(keras.tree.flatten(outputs)))))
        self._parts = [_build_output_loss(flat, places) for flat in compiled._flat_losses]
        for part in self._parts:
            if getattr(_get_at(part.path, outputs), "_keras_mask", None) is not None:
                raise InvalidInput(
                    f"the output of loss {part.name!r} carries a mask, whose number of elements is known only behind "
                    "the forward pass: weight the rows with sample_weight_col, or end the mask before the output."
                )

    @property
    def count(self) -> int:
        return len(self._parts)

    @property
    def names(self) -> list[str]:
        """Names under which the history lists the losses one by one; none for a single loss."""
        return [f"{part.name}_loss" for part in self._parts] if len(self._parts) > 1 else []

    def factors(self, group: Group | None, batch: Batch) -> list[float]:
        """What the sum of each loss is multiplied with; the ranks agree where weights or labels make a divisor.
        group: None: the batch has all rows of the step. Raises InvalidInput as `check_labels`."""
        self.check_labels(batch)
        divisors = [1.0 if part.reduction == "sum" else float(batch.planned) for part in self._parts]
        own = {k: found for k, p in enumerate(self._parts) if (found := p.find_divisor(batch)) is not None}
        if own:
            sums = np.array([*own.values()])
            totals = sums if group is None else group.allgather(sums).sum(0)
            for k, total in zip(own, totals, strict=True):
                divisors[k] = float(total) or 1.0
        return [1.0 / divisor for divisor in divisors]

    def check_labels(self, batch: Batch) -> None:
        """Raise InvalidInput if a loss of classes has a label that is no whole number, or not in 0 to 1."""
        for part in self._parts:
            label = batch.labels[part.place]
            if part.of_classes and label.dtype.kind in "fV":  # V: bfloat16
                wrong, takes = label[label != np.trunc(label)], _CLASSES
            elif part.is_binary:  # which would train on others in silence
                wrong, takes = label[(label < 0) | (label > 1)], _TRUTHS
            else:
                continue
            if wrong.size:
                name, n = self._label_cols[part.place], float(wrong[0])
                raise InvalidInput(f"column {name!r} has {n:g}, and {part.loss.fn.__name__} takes {takes}.")

    def total(self, labels: Any, outputs: Any, weights: Any, factors: Any, part: Any) -> Total:
        """(these rows' part of the step's loss, the part of each loss). Called while TensorFlow traces.
        part: fraction of the step's rows that these rows are."""
        total, own = self.total_of_outputs(labels, outputs, weights, factors)
        return total + self.total_of_layers(tf.shape(tf.nest.flatten(outputs)[0])[0], part), own

    def total_of_outputs(self, labels: Any, outputs: Any, weights: Any, factors: Any) -> Total:
        """As `total`, without what layers add."""
        sums = [(p, self._sum(p, labels, outputs, weights)) for p in self._parts]
        own = [total * tf.cast(factors[k], p.loss.dtype) for k, (p, total) in enumerate(sums)]
        return sum(tf.cast(o, self._dtype) * p.weight for o, p in zip(own, self._parts, strict=True)), own

    def total_of_layers(self, rows: Any, part: Any) -> Any:
        """What layers have added in the newest call of the model, for so many rows (`add_loss`, penalties)."""
        total = tf.zeros((), self._dtype)
        for extra in self._model.losses:
            total += _weight_by_rows(tf.cast(extra, self._dtype), rows, tf.cast(part, self._dtype))
        return total

    def _sum(self, part: _OutputLoss, labels: Any, outputs: Any, weights: Any) -> Any:
        label, output = _get_at(part.path, labels), _get_at(part.path, outputs)
        values = part.loss(label, output, sample_weight=weights)
        _check_values(values, label, output)
        rows = tf.cast(tf.shape(tf.nest.flatten(output)[0])[0], part.loss.dtype)
        if values.shape.rank == 0:  # the user's function takes the mean itself
            return values * rows if part.reduction in MEANS else values
        summed = tf.reduce_sum(values)
        if part.reduction == "sum" or part.ignored is not None:
            return summed
        if part.reduction == "mean_with_sample_weight" and weights is not None:
            return summed
        return summed * rows / tf.cast(tf.size(values), part.loss.dtype)


def _check_values(values: Any, label: Any, output: Any) -> None:
    """Refuse a loss of pairs of rows, such as (n, n). Only TensorFlow's first trace is sure to know the sizes."""
    labels, outputs = ([each.shape for each in keras.tree.flatten(tensors)] for tensors in (label, output))
    if not all(shape.is_fully_defined() for shape in map(tf.TensorShape, [values.shape, *labels, *outputs])):
        return
    most = max(sum(map(math.prod, shapes)) for shapes in (labels, outputs))
    if math.prod(values.shape) > most:
        output_shapes, label_shapes = (" and ".join(str(tuple(s)) for s in x) for x in (outputs, labels))
        raise InvalidInput(
            f"the loss made {tuple(values.shape)} out of the model's output {output_shapes} and labels {label_shapes}: "
            "give output and label the same shape."
        )


def _build_output_loss(flat: tuple[Any, ...], places: Any) -> _OutputLoss:
    path, loss, weight, name = flat
    chosen = loss.reduction
    if chosen not in (*MEANS, "sum"):
        raise InvalidInput(f"loss {name!r} has reduction={chosen!r}: choose sum_over_batch_size or sum.")
    # A copy: the model's own loss stays as the user compiled it. Keras's `copy` would look up functions by name.
    summed = object.__new__(type(loss))
    vars(summed).update(vars(loss), reduction="none")
    ignored = getattr(loss, "_fn_kwargs", {}).get("ignore_class")
    weight = 1.0 if weight is None else float(weight)
    return _OutputLoss(path, summed, weight, name, chosen, ignored, _get_at(path, places))


def _weight_by_rows(extra: Any, rows: Any, part: Any) -> Any:
    """What `add_loss` adds to the step's loss: a number for each row its sum, another one the rows' part of it."""
    summed = tf.reduce_sum(extra)
    if extra.shape.rank == 0:
        return summed * part
    return tf.where(tf.shape(extra)[0] == rows, summed, summed * part)


# Until Keras 3.13 an activity penalty is the sum over the rows; later it is their mean.
SUMS_ACTIVITY = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14)


@contextmanager
def activity_by_row(model: Any, rows: Any) -> Iterator[None]:
    """Make penalties of activity that are sums over rows a number for each row: a single number counts as a mean."""
    layers = [each for each in model._flatten_layers() if each.activity_regularizer is not None]
    own = [(each, each.activity_regularizer) for each in layers if SUMS_ACTIVITY]
    for layer, regularizer in own:
        layer.activity_regularizer = functools.partial(_spread, regularizer, rows)
    try:
        yield
    finally:
        for layer, regularizer in own:
            layer.activity_regularizer = regularizer


def _spread(regularizer: Callable[[Any], Any], rows: Any, output: Any) -> Any:
    penalty = regularizer(output)
    return tf.fill([rows], penalty / tf.cast(rows, penalty.dtype))


def _get_at(path: Sequence[Any], structure: Any) -> Any:
    for key in path:
        if keras.tree.is_nested(structure):
            structure = structure[key]
    return structure


def list_layer_metrics(model: Any) -> list[Any]:
    """The metrics that the model and its layers own and update in their calls."""
    tracked = [model._loss_tracker, model._compile_metrics, *model._compile_loss.metrics]
    known = set(map(id, tracked))
    return list({id(metric): metric for metric in model.metrics if id(metric) not in known}.values())


def compute_results(metrics: Sequence[Any]) -> dict[str, Any]:
    """By name, as Keras's history has them."""
    found: dict[str, Any] = {}
    for metric in metrics:
        result = metric.result()
        found.update(result if isinstance(result, dict) else {metric.name: result})
    return {name: np.asarray(value).tolist() for name, value in found.items()}


class LayerMetrics:
    """Metrics that layers update in their calls: what a pass adds to their sums is added over all ranks."""

    def __init__(self, model: Any) -> None:
        self.metrics = list_layer_metrics(model)
        self._variables = [variable for metric in self.metrics for variable in metric.variables]
        self.reset()  # a pass has shown the shapes
        self._empty = self._read()

    def take(self) -> dict[str, float]:
        added = self._read() - self._empty
        self.reset()
        return {f"layer metric {place}": float(added[place]) for place in np.flatnonzero(added)}

    def results(self, sums: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Metrics by name. sums: first of each, what `take` returned, added up."""
        place, values = 0, self._empty.copy()
        for number in range(len(values)):
            values[number] += sums.get(f"layer metric {number}", (0.0,))[0]
        for variable in self._variables:
            size = math.prod(variable.shape)
            variable.assign(values[place : place + size].reshape(variable.shape))
            place += size
        found = compute_results(self.metrics)
        self.reset()
        return found

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset_state()

    def _read(self) -> npt.NDArray[np.float64]:
        values = [np.asarray(read_value(v), np.float64).ravel() for v in self._variables]
        return np.concatenate([np.zeros(0), *values])


class CompiledMetrics(StepMetrics):
    """Metrics of training or validation, one after the other; the accumulators are Keras's own. Rows travel once a
    step, in rank order. `sums` has each loss and each number of layers' metrics: part of the state."""

    def __init__(self, model: Any, names: Sequence[str], pack: Callable[..., Any], eager: bool) -> None:
        """names: of the losses in the history. pack: puts a list into the structure of the outputs."""
        super().__init__()
        self._names, self._pack = list(names), pack
        self._model, self._compiled = model, model._compile_metrics
        self._run = self._update if eager else tf.function(self._update, reduce_retracing=True)
        self._outputs = 0

    @property
    def variables(self) -> list[Any]:
        return [] if self._compiled is None else list(self._compiled.variables)

    def build(self, labels: Any, outputs: Any) -> None:
        """Build the accumulators from labels and outputs of one row, of which the model was called."""
        self._outputs = len(keras.tree.flatten(outputs))
        if self._compiled is not None and not self._compiled.built:
            self._compiled.build(labels, outputs)
        self._layers = LayerMetrics(self._model)

    def add(self, part: Batch, losses: Sequence[Array], outputs: Arrays) -> None:
        """Add a micro-batch of this rank. losses: their parts of the step's; (): `add_losses` has those of all rows."""
        self.add_losses(losses, len(part), part.planned)
        logged = {name: (total, len(part)) for name, total in self._layers.take().items()}
        weights = [] if part.weights is None else [part.weights]
        columns = None if self._compiled is None else [*map(read_value, [*outputs, *part.labels, *weights])]
        self.add_rows(logged, columns)

    def add_losses(self, losses: Sequence[Array], rows: int, planned: int) -> None:
        """Add the parts of the losses of so many rows in the step's loss, of `planned` rows."""
        means = {name: float(loss) * planned for name, loss in zip(self._names, losses, strict=False)}
        self.add_rows({name: (total, rows) for name, total in means.items()}, None)

    def gather(self, group: Group) -> None:
        self._layers.reset()  # of passes that ran again for their gradients
        if self._compiled is not None or self._names or self._layers.metrics:
            super().gather(group)

    def discard(self) -> None:
        self._layers.reset()
        super().discard()

    def _count_rows(self, columns: Arrays) -> None:
        self._run([tf.constant(column) for column in columns])

    def results(self) -> dict[str, Any]:
        losses = {name: self.sums[name] for name in self._names if name in self.sums}
        compiled = [] if self._compiled is None else [self._compiled]
        means = {name: total / (rows or 1) for name, (total, rows) in losses.items()}
        return {**means, **compute_results(compiled), **self._layers.results(self.sums)}

    def reset(self) -> None:
        self.sums = {}
        if self._compiled is not None:
            self._compiled.reset_state()

    def _update(self, columns: list[Any]) -> None:
        count = self._outputs
        outputs, labels, rest = columns[:count], columns[count : 2 * count], columns[2 * count :]
        weights = rest[0] if rest else None
        self._compiled.update_state(self._pack(labels), self._pack(outputs), sample_weight=weights)
