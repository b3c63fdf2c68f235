"""A number that no epoch will have is named before the first job, with those that there are; and what watches it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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


HARMLESS = (BestWeights(), LearningRateSchedule(measure_distance))  # which add no number


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
def test_metrics_that_callbacks_watch_must_exist(
    objects: TorchUserObjects, validates: bool, says: str | None
) -> None:
    labels = ["a", "b"][: len(objects.losses)]
    with nullcontext() if says is None else pytest.raises(InvalidInput, match=says):
        check_watched(objects, labels, validates)
    with pytest.raises(
        InvalidInput, match="'gap', which the epoch has not: set its monitor to one of far, l"
    ):
        get_monitored({"loss": 1.0, "far": 2.0}, "gap")


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
