"""Metrics over steps and worlds: what a newcomer takes over, what the history has, what callbacks may watch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.callbacks import (
    BestWeights,
    Callback,
    EarlyStopping,
    LearningRateSchedule,
    Training,
    get_monitored,
)
from spark_elastic.training.torch.loss import LossResult, RowLoss
from spark_elastic.training.torch.metrics import Metrics, name_metrics
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.trainer import check_watched
from spark_elastic.training.trainer import sync_state
from tests.checkpoints import reload_from_checkpoint
from tests.worlds import run_in_world


class MeanDistance(torch.nn.Module):
    """In torchmetrics' form: accumulators that `state_dict` leaves out until they are persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.rows = torch.zeros(()), 0
        self._persistent, self._update_count = False, 0

    def persistent(self, mode: bool = False) -> None:
        self._persistent = mode

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self._update_count += 1
        self.total = self.total + (output - label).abs().sum()
        self.rows += len(label)

    def compute(self) -> Any:
        assert self._update_count
        return self.total / self.rows

    def reset(self) -> None:
        self.total, self.rows, self._update_count = torch.zeros(()), 0, 0

    def get_extra_state(self) -> Any:
        return {"total": self.total, "rows": self.rows} if self._persistent else {}

    def set_extra_state(self, state: Any) -> None:
        self.total, self.rows = state["total"], state["rows"]


class WrappingMetric(torch.nn.Module):
    """One that holds another, and computes several numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MeanDistance()

    def update(self, *arguments: torch.Tensor) -> None:
        self.inner.update(*arguments)

    def compute(self) -> Any:
        return {"mean": self.inner.compute(), "curve": (torch.ones(2), torch.zeros(3))}

    def reset(self) -> None:
        self.inner.reset()


STEPS = [([0.0, 2.0], [1.0, 1.0]), ([5.0], [1.0]), ([1.0, 1.0, 1.0], [0.0, 1.0, 3.0])]


def count_step(metrics: Metrics, group: Group, step: Any, kind: torch.dtype | None = None) -> None:
    """Rank 0 has the rows."""
    if group.rank == 0:
        output, label = (torch.as_tensor(side, dtype=kind) for side in step)
        metrics.add(LossResult(torch.zeros(()), len(label), (output,)), (label,))
    metrics.gather(group)
    metrics.commit()


def test_p4_a_newcomer_and_a_resumed_run_continue_metrics() -> None:
    def make_metrics() -> tuple[Metrics, TorchTrainingState]:
        net = torch.nn.Linear(1, 1)
        metrics = Metrics(name_metrics([MeanDistance(), WrappingMetric()]), ["y"], logs=False)
        return metrics, TorchTrainingState(net, torch.optim.SGD(net.parameters(), lr=0.1), [metrics])

    def work(group: Group) -> tuple[Any, Any, Any]:
        metrics, state = make_metrics()
        for step in STEPS[:2]:
            count_step(metrics, group, step)
        if group.rank == 1:
            metrics, state = make_metrics()
        sync_state(state, group, 0, group.rank == 1)
        count_step(metrics, group, STEPS[2])
        resumed, other = make_metrics()
        reload_from_checkpoint(state, other)
        results = metrics.results(), resumed.results()
        metrics.reset()
        count_step(metrics, group, STEPS[1])
        return *results, metrics.results()

    done = run_in_world(2, work)
    far, curve = (2 + 4 + 3) / 6, [[1.0, 1.0], [0.0, 0.0, 0.0]]
    expected = {"meandistance": far, "wrappingmetric_mean": far, "wrappingmetric_curve": curve}
    for whole, resumed, after in done:
        assert whole == resumed == expected
        assert (after["meandistance"], after["wrappingmetric_mean"]) == (4.0, 4.0)
    assert done[0] == done[1]


@pytest.mark.native
def test_a_loss_of_classes_as_a_metric_is_that_of_all_rows_of_the_epoch() -> None:
    """All labels of one step are ignored, and classes have weights."""
    loss = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 5.0]), ignore_index=-1)
    output, label = torch.arange(12.0).reshape(6, 2).sin(), torch.tensor([0, 1, -1, -1, 1, 1])
    metrics = Metrics({"own": loss}, ["y"], logs=False)

    def work(group: Group) -> Any:
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
            count_step(metrics, group, (output[rows], label[rows]))
        return metrics.results()

    assert run_in_world(1, work) == [{"own": pytest.approx(float(loss(output, label)))}]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_metrics_take_outputs_of_16_bits(kind: torch.dtype) -> None:
    metrics = Metrics(name_metrics([torch.nn.functional.l1_loss]), ["y"], logs=False)

    def work(group: Group) -> Any:
        count_step(metrics, group, ([0.0, 0.0], [1.0, 1.0]), kind)
        return metrics.results()

    assert run_in_world(1, work) == [{"l1_loss": 1.0}]


def test_a_label_per_row_fits_an_output_of_one_column() -> None:
    """As in the loss: a column and a row would make a matrix, of which the mean is another number."""
    theirs = type("MeanError", (MeanDistance,), {"__module__": "torchmetrics.regression"})()

    def compute_own_metric(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - label).abs().mean()

    l1 = torch.nn.functional.l1_loss
    partial = functools.partial(l1, weight=None)
    given = {"l1": l1, "no_module": partial, "theirs": theirs, "own": compute_own_metric}
    metrics = Metrics(given, ["y"], logs=False)
    metrics._update([torch.tensor([[1.0], [2.0], [4.0]])], [torch.tensor([1.0, 1.0, 1.0])])
    assert metrics.results() == pytest.approx(dict.fromkeys(given, 4 / 3))


def test_a_metric_that_computes_no_number_is_named() -> None:
    metrics = Metrics({"odd": SimpleNamespace()}, ["y"], logs=False)
    metrics._objects = {"odd": ("odd", SimpleNamespace(compute=lambda: {"a": "text"}))}
    metrics._updates = 1
    with pytest.raises(InvalidInput, match="the metric 'odd_a' computed 'text': compute must return numbers"):
        metrics.results()
    with pytest.raises(InvalidInput, match="metrics need the model's outputs, and found no tensor"):
        metrics.add(LossResult(torch.zeros(()), 1, ()), (torch.zeros(1),))


def test_a_metric_function_may_return_a_number_for_each_row() -> None:
    hits = Metrics({"hits": lambda output, label: output == label}, ["y"], logs=False)
    hits._update([torch.tensor([1, 2, 3])], [torch.tensor([1, 2, 0])])
    hits._update([torch.tensor([1])], [torch.tensor([0])])
    assert hits.results() == {"hits": 0.5}


@pytest.mark.parametrize("returned", [torch.zeros(3, 2), None, "much"])
def test_a_metric_function_that_returns_no_number_is_named(returned: object) -> None:
    odd = Metrics({"odd": lambda output, label: returned}, ["y"], logs=False)
    with pytest.raises(InvalidInput, match=r"metric 'odd' returned a .* for 3 rows: return one number, or"):
        odd._update([torch.zeros(3)], [torch.zeros(3)])


def test_a_metric_collection_counts_as_its_members() -> None:
    far = MeanDistance()
    methods = dict.fromkeys(("update", "compute", "reset"), print)
    members: Any = SimpleNamespace(items=lambda: [("a", far), ("b", far)], **methods)
    assert list(name_metrics(members)) == ["a", "b"]
    assert list(name_metrics([members, far])) == ["a", "b", "meandistance"]
    assert list(name_metrics({"m": members, "far": far})) == ["m_a", "m_b", "far"]
    assert list(name_metrics(far)) == ["meandistance"]
    assert list(name_metrics([lambda output, label: 0.0])) == ["metric"]
    with pytest.raises(InvalidInput, match="two metrics have the same name"):
        name_metrics([members, members])
    with pytest.raises(InvalidInput, match="a metric is named 'loss', as one of the fit's own numbers"):
        name_metrics({"loss": far})


def test_metrics_of_the_installed_torchmetrics_work() -> None:
    given = pytest.importorskip("torchmetrics")
    kinds = given.classification
    classes = kinds.MulticlassAccuracy(num_classes=2, average=None)
    collection = given.MetricCollection([kinds.BinaryAccuracy(), kinds.BinaryF1Score()])
    curve = kinds.BinaryROC(thresholds=3)
    metrics = [collection, kinds.BinaryAUROC(), given.ClasswiseWrapper(classes), curve]
    first, joined = (Metrics(name_metrics(metrics), ["y"], logs=False) for _ in range(2))
    steps = [([0.0, 1.0, 0.0], [0, 1, 1]), ([1.0, 0.0], [0, 1])]
    both = [(torch.tensor(output), torch.tensor(label)) for output, label in steps]
    first._update([both[0][0]], [both[0][1]])
    joined.load_state_dict(first.state_dict())
    for each in (first, joined):
        each._update([both[1][0]], [both[1][1]])
    found = first.results()
    assert found == joined.results()
    assert found["BinaryAccuracy"] == pytest.approx(0.4)
    assert found["classwisewrapper_multiclassaccuracy_0"] == 0.5
    assert np.shape(found["binaryroc"]) == (3, 3)
    assert {"BinaryF1Score", "binaryauroc"} < set(found)
    column = Metrics({"r2": given.R2Score()}, ["y"], logs=False)
    column._update([torch.tensor([[1.0], [2.0]])], [torch.tensor([1.0, 2.0])])
    assert column.results() == {"r2": 1.0}


class Hits:
    """Its accumulators are its attributes."""

    def __init__(self) -> None:
        self.reset()

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.hits += int((output == label).sum())

    def compute(self) -> int:
        return self.hits

    def reset(self) -> None:
        self.hits = 0


def mean_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).mean()


@pytest.mark.parametrize(
    ("metric", "result"), [(MeanDistance(), 1.0), (Hits(), 1), (WrappingMetric(), 1.0), (mean_error, 1.0)]
)
def test_a_metric_of_another_class_under_the_same_name_begins_anew(metric: Any, result: float) -> None:
    """Or under another name."""
    kinds = MeanDistance, Hits, WrappingMetric
    for former, name in (*((kind(), "near") for kind in kinds), (Hits(), "far")):
        if type(former) is type(metric) and name == "near":
            continue
        first, other = Metrics({name: former}, ["y"], False), Metrics({"near": metric}, ["y"], False)
        first._update([torch.tensor([5.0, 0.0])], [torch.tensor([0.0, 0.0])])
        other.load_state_dict(first.state_dict())
        other._update([torch.tensor([2.0, 0.0])], [torch.tensor([0.0, 0.0])])
        assert result in other.results().values()
        other.reset()


@pytest.mark.parametrize(
    ("metric", "output", "label"),
    [
        (F.cross_entropy, torch.rand(4, 3), torch.tensor([0.0, 1.0, 2.0, 1.0])),
        (torch.nn.CrossEntropyLoss(), torch.rand(4, 3, 2), torch.tensor([[0.0, 1.0]] * 4)),
        (functools.partial(F.nll_loss), torch.rand(4, 3), torch.tensor([0.0, 1.0, 2.0, 1.0])),
        (F.binary_cross_entropy_with_logits, torch.rand(4, 1), torch.tensor([0, 1, 1, 0])),
        (F.mse_loss, torch.rand(4, 1), torch.tensor([False, True, True, False])),
    ],
)
def test_a_loss_of_torch_takes_the_same_labels_as_a_metric(metric: Any, output: Any, label: Any) -> None:
    metrics = Metrics({"found": metric}, ["y"], logs=False)
    metrics._update([output], [label])
    expected = RowLoss(metric)(output, (label,), None)
    assert metrics.results()["found"] == pytest.approx(float(expected.total) / expected.denominator)


def test_a_metric_of_classes_names_the_column_of_a_wrong_one() -> None:
    metrics = Metrics({"found": F.cross_entropy}, ["kind", "size"], logs=False)
    with pytest.raises(InvalidInput, match=r"column 'size' has 0.5, and CrossEntropyLoss takes whole"):
        metrics._update([torch.rand(1, 3)] * 2, [torch.tensor([1.0]), torch.tensor([0.5])])


class AddMetric(Callback):
    def on_epoch_end(self, training: Any, logs: Any) -> None:
        logs["gap"] = 1.0


def make_objects(*names: str, callbacks: tuple[Callback, ...] = (), losses: int = 1) -> TorchUserObjects:
    model = torch.nn.Linear(1, 1)
    found = tuple(EarlyStopping(name) for name in names)
    mse: tuple[Callable[..., torch.Tensor], ...] = (torch.nn.MSELoss(),) * losses
    metrics = {"far": mean_error, "curve": WrappingMetric()}
    return TorchUserObjects(model, None, mse, metrics=metrics, callbacks=(*found, *callbacks), watched=names)


HARMLESS = (BestWeights(), LearningRateSchedule(mean_error))  # which add no number


@pytest.mark.parametrize(
    ("objects", "validates", "says"),
    [
        *(
            (make_objects(name), True, None)
            for name in ("loss", "far", "val_loss", "val_far", "curve", "val_curve_auc", "learning_rate")
        ),
        (make_objects("loss_b", "val_far_a", losses=2), True, None),
        (make_objects("gap", callbacks=(AddMetric(),)), False, None),  # looked for at the end of the epoch
        (make_objects("loss_b"), True, "'loss_b', which no epoch will have"),
        (
            make_objects("val_los", callbacks=HARMLESS),
            True,
            "'val_los', which no epoch will have: set its monitor to one of loss, far, curve, val_loss, val_far,",
        ),
        (make_objects("los"), False, r"'los', which .* one of loss, far, curve\.$"),
        (make_objects("val_los"), False, r"one of loss, far, curve \(those with val_ need a validation\)\.$"),
        (make_objects("loss", "val_loss"), False, "watches 'val_loss', but nothing is validated"),
    ],
)
def test_metrics_that_callbacks_watch_must_exist(objects: Any, validates: bool, says: str | None) -> None:
    labels = ["a", "b"][: len(objects.losses)]
    with nullcontext() if says is None else pytest.raises(InvalidInput, match=says):
        check_watched(objects, labels, validates)
    with pytest.raises(InvalidInput, match="'gap', which the epoch has not: set its monitor to one of far, "):
        get_monitored({"loss": 1.0, "far": 2.0}, "gap")


@pytest.mark.parametrize(("patience", "ends_after"), [(0, 3), (1, 3), (2, 6)])
def test_a_training_ends_after_patience_epochs_without_progress(patience: int, ends_after: int) -> None:
    """Epochs that improve never end it."""
    stopping = EarlyStopping("loss", patience)
    model = torch.nn.Linear(1, 1)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [3.0, 2.0, 2.0, 1.0, 1.0, 1.0]
    for epoch, loss in enumerate(losses):
        stopping.on_epoch_end(training, {"epoch": epoch, "loss": loss})
        if training.stopped:
            break
    assert epoch + 1 == ends_after
    assert training.stopped == f"loss has not improved for {max(1, patience)} epochs"
