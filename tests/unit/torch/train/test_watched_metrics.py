"""A number that no epoch will have is named before the first job, with those that there are; and what watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.callbacks import (
    BestWeights,
    Callback,
    EarlyStopping,
    LearningRateSchedule,
    Training,
    get_monitored,
)
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import check_watched


def measure_distance(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


class Curve:
    """A metric object, whose `compute` may give a dict."""

    def update(self, *arguments: Any) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


class AddMetric(Callback):
    def on_epoch_end(self, training: Any, logs: Any) -> None:
        logs["gap"] = 1.0


def make_objects(*names: str, callbacks: tuple[Callback, ...] = (), losses: int = 1) -> TorchUserObjects:
    model = torch.nn.Linear(1, 1)
    found = tuple(EarlyStopping(name) for name in names)
    mse: tuple[Callable[..., torch.Tensor], ...] = (torch.nn.MSELoss(),) * losses
    metrics = {"far": measure_distance, "curve": Curve()}
    return TorchUserObjects(model, None, mse, metrics=metrics, callbacks=(*found, *callbacks), watched=names)


@pytest.mark.parametrize(
    "name", ["loss", "far", "val_loss", "val_far", "curve", "val_curve_auc", "learning_rate"]
)
def test_metrics_of_an_epoch_may_be_watched(name: str) -> None:
    check_watched(make_objects(name), ["y"], validates=True)


def test_several_outputs_have_metrics_of_their_own() -> None:
    check_watched(make_objects("loss_b", "val_far_a", losses=2), ["a", "b"], validates=True)
    with pytest.raises(InvalidInput, match="'loss_b', which no epoch will have"):
        check_watched(make_objects("loss_b"), ["b"], validates=True)


def test_a_misspelled_metric_is_named_with_the_known_ones() -> None:
    says = "watches 'val_los', which no epoch will have: set its monitor to one of loss, far, curve, val_loss, val_far,"
    with pytest.raises(InvalidInput, match=says):
        check_watched(
            make_objects("val_los", callbacks=(BestWeights(), LearningRateSchedule(measure_distance))),
            ["y"],
            True,
        )
    with pytest.raises(InvalidInput, match=r"'los', which .* one of loss, far, curve\.$"):
        check_watched(make_objects("los"), ["y"], validates=False)
    with pytest.raises(
        InvalidInput, match=r"one of loss, far, curve \(those with val_ need a validation\)\.$"
    ):
        check_watched(make_objects("val_los"), ["y"], validates=False)


def test_metrics_that_callbacks_may_add_are_checked_at_the_end_of_the_epoch() -> None:
    check_watched(make_objects("gap", callbacks=(AddMetric(),)), ["y"], validates=False)
    with pytest.raises(
        InvalidInput, match="'gap', which the epoch has not: set its monitor to one of far, loss"
    ):
        get_monitored({"loss": 1.0, "far": 2.0}, "gap")


def test_validation_metrics_need_validation_rows() -> None:
    with pytest.raises(InvalidInput, match="a callback watches 'val_loss', but nothing is validated"):
        check_watched(make_objects("loss", "val_loss"), ["y"], validates=False)


@pytest.mark.parametrize(("patience", "ends_after"), [(0, 3), (1, 3), (2, 6)])
def test_a_training_ends_after_as_many_epochs_without_progress_as_patience_says(
    patience: int, ends_after: int
) -> None:
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
