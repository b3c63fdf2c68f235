"""Metrics of an epoch, exact for any division of its rows: every rank receives outputs and labels of the whole step.

A metric is a function of (output, label) that returns a mean over rows or a number for each row, or an object with
`update`, `compute` and `reset` (torchmetrics), which is part of the state. Main thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import HostCopy
from spark_elastic.training.batch import Arrays, StepMetrics
from spark_elastic.training.progress import check_metric_names
from spark_elastic.training.torch.loss import (
    LabelConverter,
    Labels,
    LossResult,
    RowLoss,
    refuse_broadcast,
    to_float32,
)


class Metrics(StepMetrics):
    def __init__(
        self, metrics: Mapping[str, Any], labels: Sequence[str], logs: bool, prefix: str = ""
    ) -> None:
        """metrics: by name; of several outputs, for each label. logs: the loss reports numbers, too."""
        super().__init__()
        self._given = metrics
        self._labels = labels
        # By name as given, and label, as those after it.
        pairs = [(name, label, metric) for name, metric in metrics.items() for label in labels]
        self._converters = {(name, label): LabelConverter(metric, label) for name, label, metric in pairs}
        self._losses = {(name, label): _find_class_loss(metric, label) for name, label, metric in pairs}
        self._logs, self._prefix = logs, prefix
        self._objects: dict[str, tuple[str, Any]] = {}  # name -> (name as given, accumulator)
        self._updates = 0
        self._coming: list[tuple[dict[str, float], HostCopy, HostCopy | None]] = []  # divisors, sums, columns

    def add(self, result: LossResult, labels: Sequence[Tensor]) -> None:
        if not (self._given or self._logs):
            return
        sums = [torch.as_tensor(total, dtype=torch.float64) for total, _ in result.logged.values()]
        divisors = {name: divisor for name, (_, divisor) in result.logged.items()}
        columns = self._copy_columns(result, labels) if self._given else None
        self._coming.append((divisors, HostCopy(sums), columns))

    def try_rows(self, result: LossResult, labels: Sequence[Tensor], rows: int) -> None:
        """Compute the metrics of these rows, repeated to so many as a step has: for a trial, without other ranks."""
        if self._given:
            times = -(-rows // len(labels[0]))
            columns = [torch.cat([each] * times)[:rows] for each in self._copy_columns(result, labels).wait()]
            self._update(columns[: -len(labels)], columns[-len(labels) :])

    def _copy_columns(self, result: LossResult, labels: Sequence[Tensor]) -> HostCopy:
        if not result.outputs:
            raise InvalidInput(
                "metrics need the model's outputs, and found no tensor among them: return tensors, or a tuple, list or "
                "dict of them, or leave metrics out."
            )
        return HostCopy([to_float32(tensor.detach()) for tensor in (*result.outputs, *labels)])

    def gather(self, group: Group) -> None:
        coming, self._coming = self._coming, []
        for divisors, sums, columns in coming:
            pairs = zip(divisors.items(), sums.wait(), strict=True)
            logged = {name: (float(total), divisor) for (name, divisor), total in pairs}
            self.add_rows(logged, None if columns is None else [column.numpy() for column in columns.wait()])
        if self._given or self._logs:
            super().gather(group)

    def discard(self) -> None:
        self._coming = []
        super().discard()

    def _count_rows(self, columns: Arrays) -> None:
        whole, labels = [torch.from_numpy(column) for column in columns], len(self._labels)
        self._update(whole[:-labels], whole[-labels:])

    def results(self) -> dict[str, Any]:
        """The metrics of all rows since `reset`: numbers or lists of them, by name."""
        found: dict[str, Any] = {name: total / (divisor or 1) for name, (total, divisor) in self.sums.items()}
        for name, (_, metric) in self._objects.items():
            if self._updates:
                found.update(_flatten_result(name, metric.compute()))
        prefix = self._prefix  # which LightningModules give their names themselves
        return {name if name.startswith(prefix) else prefix + name: found[name] for name in found}

    def reset(self) -> None:
        self.sums, self._updates = {}, 0
        for _, metric in self._objects.values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        objects = {n: (given, type(m).__name__, _state_of(m)) for n, (given, m) in self._objects.items()}
        return {"sums": dict(self.sums), "updates": self._updates, "objects": objects}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self._updates = dict(state["sums"]), state["updates"]
        self._objects = {
            name: (given, _restore_metric(self._given[given], saved, self._updates))
            for name, (given, kind, saved) in state["objects"].items()
            if type(self._given.get(given)).__name__ == kind  # a run may be resumed with other metrics
        }

    def _update(self, outputs: list[Tensor], labels: list[Tensor]) -> None:
        self._updates += 1
        if len(outputs) == 1:
            calls = [("", self._labels[0], outputs[0], tuple(labels))]
        elif len(outputs) == len(labels):
            pairs = zip(self._labels, outputs, labels, strict=True)
            calls = [(f"_{name}", name, output, (label,)) for name, output, label in pairs]
        else:
            raise InvalidInput(
                f"metrics need one output of the model, or one per label column: it returned {len(outputs)} for "
                f"{len(labels)} labels."
            )
        for given, metric in self._given.items():
            for suffix, column, output, others in calls:
                name = given + suffix
                class_loss = self._losses[given, column]
                if class_loss is not None:
                    summed = class_loss(output, others, None)
                    self._count(name, float(summed.total), summed.denominator)
                    continue
                arguments = output, *_convert_labels(metric, self._converters[given, column], output, others)
                is_object = is_accumulator(metric)
                if is_object and name not in self._objects:
                    self._objects[name] = (given, copy.deepcopy(metric))
                with refuse_broadcast(f"the metric {given!r}", output, arguments[1:]):
                    value = self._objects[name][1].update(*arguments) if is_object else metric(*arguments)
                if not is_object:
                    rows = len(labels[0])
                    self._count(name, _average_rows(given, value, rows) * rows, rows)


def _find_class_loss(metric: Any, label: str) -> RowLoss | None:
    """A loss of classes, whose mean does not show its divisor. None: another metric, or one that returns a sum."""
    if not LabelConverter(metric).of_classes:
        return None
    try:
        loss = RowLoss(metric, label=label)
    except InvalidInput:  # a `partial` with arguments of the function alone
        return None
    return None if loss.is_summed else loss


def _average_rows(name: str, value: Any, rows: int) -> float:
    """The mean of what a metric returned, one number or one for each row. Raises InvalidInput: something else."""
    try:
        numbers = torch.as_tensor(value).double()
    except (TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None or numbers.numel() not in (1, rows):
        shape = "" if numbers is None else f" of shape {tuple(numbers.shape)}"
        raise InvalidInput(
            f"the metric {name!r} returned a {type(value).__name__}{shape} for {rows} rows: return one number, or "
            "one for each row."
        )
    return float(numbers.mean())


def _convert_labels(
    metric: Any, converter: LabelConverter, output: Tensor, labels: Labels
) -> tuple[Tensor, ...]:
    """torch's losses get labels as in training, torchmetrics (n,) as (n, 1) for such an output, others unchanged."""
    if not type(metric).__module__.startswith("torchmetrics."):
        return converter.match_output(output, converter.convert_classes(labels, output))
    label, *others = labels
    is_column = label.ndim == 1 and output.shape == (len(label), 1)
    return (label.unsqueeze(1), *others) if is_column else labels


def name_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics by name: that of the function ("metric" for a lambda), or of the class in lower case. Each member of
    a collection (torchmetrics) has its own name, with the name of the collection before it if the user gave one.
    Raises InvalidInput: one is neither a function nor a metric object, two have the same name, or one has the name of
    one of the fit's own numbers."""
    if is_accumulator(metrics) or callable(metrics) or not isinstance(metrics, Iterable):
        metrics = [metrics]
    pairs: list[tuple[str, Any]] = []
    if isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            members = metric.items() if _is_collection(metric) else ()
            pairs += [(f"{name}_{member}", each) for member, each in members] or [(str(name), metric)]
    else:
        for metric in metrics:
            own = getattr(metric, "__name__", type(metric).__name__.lower()).replace("<lambda>", "metric")
            pairs += list(metric.items()) if _is_collection(metric) else [(own, metric)]
    for name, metric in pairs:
        if isinstance(metric, type) or not (callable(metric) or is_accumulator(metric)):
            raise InvalidInput(
                f"metrics must be functions of (output, label) or objects with update, compute and reset; {name!r} "
                f"is {metric!r}."
            )
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InvalidInput("two metrics have the same name: give them as a dict of names.")
    check_metric_names(found)
    return found


def is_accumulator(metric: Any) -> bool:
    """Whether it is an object with torchmetrics' methods, not a function."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _is_collection(metric: Any) -> bool:
    return is_accumulator(metric) and callable(getattr(metric, "items", None))


def _flatten_result(name: str, value: Any) -> dict[str, Any]:
    """The result of `compute` for the history: numbers or lists of them; each entry of a dict has its own name."""
    if not isinstance(value, Mapping):
        return {name: _plain(name, value)}
    parts = [_flatten_result(f"{name}_{key}", part) for key, part in value.items()]
    return dict(entry for part in parts for entry in part.items())


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(name, part) for part in value]
    try:
        return torch.as_tensor(value).tolist()
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(
            f"the metric {name!r} computed {value!r}: compute must return numbers, tensors, or lists or dicts of them."
        ) from None


def _state_of(metric: Any) -> dict[str, Any]:
    if not hasattr(metric, "state_dict"):
        return dict(vars(metric))
    for part in _parts(metric):  # torchmetrics leaves its accumulators out otherwise
        part.persistent(True)
    state: dict[str, Any] = metric.state_dict()
    return state


def _parts(metric: Any) -> list[Any]:
    """The metric and those that it wraps, where they are torchmetrics'."""
    inner = metric.modules() if isinstance(metric, torch.nn.Module) else [metric]
    return [part for part in inner if hasattr(part, "persistent")]


def _restore_metric(metric: Any, saved: dict[str, Any], updates: int) -> Any:
    metric = copy.deepcopy(metric)
    if not hasattr(metric, "load_state_dict"):
        vars(metric).update(saved)
        return metric
    for part in _parts(metric):
        part.persistent(True)
        part._update_count = updates  # without it torchmetrics warns of results without data
    metric.load_state_dict(saved)
    return metric
