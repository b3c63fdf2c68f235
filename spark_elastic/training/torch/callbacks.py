"""Callbacks of the estimator's training, and the list that calls them; all ranks follow rank 0: R6 (step summary).

They run on all workers, which hold the same numbers, so that replicas stay equal. Main thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.module_state import ModelStateHandler, find_difference
from spark_elastic.training.trainer import CallbackList
from spark_elastic.worker.context import get_context

__all__ = ["BestWeights", "Callback", "EarlyStopping", "LearningRateSchedule", "Logs"]
__all__ += ["Progress", "Training", "progress"]

Logs = Mapping[str, Any]


@dataclass
class Training:
    """What a callback sees and controls. The optimizer's rates may be changed in any hook, weights only in
    `on_fit_begin` and `on_fit_end`."""

    model: torch.nn.Module  # this worker's replica
    optimizer: Optimizer  # of that model
    rank: int = 0  # in the current world; rank 0 should write files
    size: int = 1  # of the current world
    stopped: str | None = None  # the reason, once a callback has asked to stop

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group; setting it sets all groups."""
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def stop(self, reason: str) -> None:
        """End the training after the step in progress, on all workers; validation and the epoch's end follow.
        `on_step_end` reports the previous step, so from there training ends one step later."""
        self.stopped = reason


class Callback:
    """Override the hooks that you need. `on_step_end` is called for steps that are part of the history of all workers
    (R1, finalized steps): once for each, before the next one is applied. Hooks must come to the same results on all
    workers; if they do not (clocks, files), rank 0's decision at the end of an epoch counts. The state is what
    `state_dict` returns: by default the attributes without a leading underscore, which must be plain values and
    tensors."""

    def on_fit_begin(self, training: Training) -> None:
        """Once in each worker, before its first step. Afterwards newcomers and resumed runs take over the state: rates,
        weights and attributes are then those of the others, whatever was set here."""

    def on_epoch_begin(self, training: Training, epoch: int) -> None:
        """Once in each worker, before its first step of the epoch. Of a worker that joins or resumes within an epoch,
        rates and attributes stay those of the state that it takes over, whatever is set here."""

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        """Before a forward pass; again if the step is repeated in another world."""

    def on_step_end(self, training: Training, logs: Logs) -> None:
        """logs: epoch, step, loss (mean over the step's rows), rows."""

    def on_epoch_end(self, training: Training, logs: Logs) -> None:
        """logs: the epoch's entry in the history, including validation and metrics."""

    def on_fit_end(self, training: Training, history: list[dict[str, Any]]) -> None:
        """Before the final weights are written."""

    @property
    def watches(self) -> str | None:
        """The number that the callback needs in the epoch's logs."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class _Monitor(Callback):
    """Finds out whether a number of the epoch's logs is the best one so far."""

    def __init__(self, monitor: str, mode: Literal["min", "max"], min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; got {mode!r}.")
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta
        self.best: float | None = None
        self.best_epoch = -1

    @property
    def watches(self) -> str | None:
        return self.monitor

    def update_best(self, logs: Logs) -> bool:
        """Returns whether the epoch's number is the best so far; a NaN never is. Raises InvalidInput: it is missing."""
        value = float(get_monitored(logs, self.monitor))
        if self.best is not None:
            gain = self.best - value if self.mode == "min" else value - self.best
            if not gain > self.min_delta:
                return False
        if value != value:
            return False
        self.best, self.best_epoch = value, int(logs["epoch"])
        return True


class EarlyStopping(_Monitor):
    """Ends the training once `monitor` has not improved by more than `min_delta` for `patience` epochs, or for one if
    that is 0."""

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 1,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = patience
        self.waited = 0

    def on_epoch_end(self, training: Training, logs: Logs) -> None:
        self.waited = 0 if self.update_best(logs) else self.waited + 1
        if self.waited and self.waited >= self.patience:
            training.stop(f"{self.monitor} has not improved for {self.waited} epochs")


class BestWeights(_Monitor):
    """Keeps the weights of the epoch with the best `monitor` and makes them the fitted model's."""

    def __init__(self, monitor: str = "val_loss", mode: Literal["min", "max"] = "min") -> None:
        super().__init__(monitor, mode)
        self.weights: dict[str, torch.Tensor] = {}

    def on_epoch_end(self, training: Training, logs: Logs) -> None:
        if self.update_best(logs):
            self.weights = dict(copy.deepcopy(training.model.state_dict()))

    def on_fit_end(self, training: Training, history: list[dict[str, Any]]) -> None:
        if self.weights:
            training.model.load_state_dict(self.weights)


class LearningRateSchedule(Callback):
    """One of torch's schedulers, advanced after each epoch or each applied step."""

    def __init__(
        self,
        make: Callable[[Optimizer], Any],
        every: Literal["epoch", "step"] = "epoch",
        monitor: str | None = None,
    ) -> None:
        """make: makes the scheduler. every: "epoch" or "step".
        monitor: the number in the epoch's logs that `ReduceLROnPlateau` gets."""
        if every not in ("epoch", "step"):
            raise ValueError(f"every must be 'epoch' or 'step'; got {every!r}.")
        self._make, self._every, self._monitor = make, every, monitor
        self._scheduler: Any = None

    @property
    def binding(self) -> tuple[Callable[[Optimizer], Any], str, str | None]:
        """What a run stores to recognise the schedule: (make, every, monitor)."""
        return self._make, self._every, self._monitor

    @property
    def watches(self) -> str | None:
        """The monitored number; known after `bind`."""
        return (self._monitor or "val_loss") if self._plateaus else None

    @property
    def _plateaus(self) -> bool:
        return isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def bind(self, optimizer: Optimizer) -> None:
        """Make the scheduler, which sets the optimizer's first rate. To be called before any state is loaded."""
        self._scheduler = self._make(optimizer)
        if self._plateaus and self._every == "step":
            raise InvalidInput("ReduceLROnPlateau looks at a number of each epoch: use every='epoch'.")

    def advance_step(self) -> None:
        if self._every == "step":
            self._scheduler.step()

    def on_epoch_end(self, training: Training, logs: Logs) -> None:
        if self._every == "epoch":
            watched = () if self.watches is None else (get_monitored(logs, self.watches),)
            self._scheduler.step(*watched)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


def get_monitored(logs: Logs, name: str) -> Any:
    """Return a number of an epoch's logs. Raises InvalidInput: the epoch did not log it."""
    if name not in logs:
        advice = f"set its monitor to one of {', '.join(sorted(logs))}"
        raise InvalidInput(f"a callback watches {name!r}, which the epoch has not: {advice}.")
    return logs[name]


@dataclass(frozen=True)
class Progress:
    """The step that a worker is taking."""

    epoch: int  # from 0
    step: int  # within the epoch, from 0
    generation: int  # of the world that takes the step
    rank: int  # of this worker in that world
    size: int  # of that world


def progress() -> Progress | None:
    """Return the step that this worker is taking; None outside of training."""
    worker = get_context()
    position = None if worker is None else worker.group_context.position
    if worker is None or worker.world is None or worker.group is None or position is None:
        return None
    group, generation = worker.group, worker.world.fence.generation
    return Progress(position.epoch, position.step, generation, group.rank, group.size)


# ---- the callbacks of one worker


class TorchCallbackList(CallbackList):
    """The callbacks of one worker, in order. Its own state is the newest epoch whose beginning theirs contains."""

    def __init__(self, callbacks: Sequence[Callback], model: torch.nn.Module, optimizer: Optimizer) -> None:
        self.callbacks = list(callbacks)
        self._training, self._module = Training(model, optimizer), ModelStateHandler(model)
        self._started = False
        self._group: Group | None = None  # of the world
        self._told = -1  # the newest epoch of which this worker's callbacks were told; -1: none yet
        self._begun = -1  # the newest epoch whose beginning the state of the callbacks contains; -1: none yet
        for callback in self._schedules:
            callback.bind(optimizer)

    def on_world_begin(self, group: Group) -> None:
        self.on_fit_begin(group)  # of a newcomer

    def on_fit_begin(self, group: Group) -> None:
        self._group = group
        self._training.rank, self._training.size = group.rank, group.size
        if not self._started:
            self._started = True
            for callback in self.callbacks:
                callback.on_fit_begin(self._training)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._begun, "stopped": self._training.stopped}  # a stop travels with the next step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begun, self._training.stopped = state["epoch"], state["stopped"]

    def on_epoch_begin(self, epoch: int) -> None:
        """In an epoch that others have begun, only what the state does not hold stays as the callbacks leave it.
        Raises InvalidInput: the ranks' models differ by what a callback has done; on all ranks alike."""
        joins = epoch <= self._begun
        if not joins or epoch > self._told:
            restore, optimizer = self._keep_state(weights=True) if joins else None, self._training.optimizer
            self._told = self._begun = epoch
            if joins:  # groups come with the state, too
                optimizer.add_param_group = lambda param_group: None  # type: ignore[method-assign]
            try:
                for callback in self.callbacks:
                    callback.on_epoch_begin(self._training, epoch)
            finally:
                vars(optimizer).pop("add_param_group", None)
            if restore is not None:
                restore()
        if self.callbacks and self._group is not None and self._group.size > 1:
            difference = find_difference(self._group, self._training.model)
            if difference is not None:
                where = f"{difference} in epoch {epoch + 1}"
                raise InvalidInput(f"{where}: have callbacks do the same to the model on all workers.")

    def on_step_begin(self, epoch: int, step: int) -> None:
        for callback in self.callbacks:
            callback.on_step_begin(self._training, epoch, step)

    def on_step_applied(self) -> None:
        for callback in self._schedules:
            callback.advance_step()

    def on_step_finalized(self, logs: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_step_end(self._training, logs)

    def wants_stop(self) -> bool:
        return self._training.stopped is not None

    def on_epoch_end(self, group: Group, logs: Mapping[str, Any]) -> str | None:
        """Raises CollectiveError: the group broke; the callbacks are as before, for the epoch is closed again."""
        if not self.callbacks:
            return None
        restore = self._keep_state()
        stopped = self._training.stopped  # by `on_step_end`, which is not called again
        try:
            for callback in self.callbacks:
                callback.on_epoch_end(self._training, logs)
            self._follow_rank_0(group)
        except BaseException:
            restore()
            self._training.stopped = stopped
            raise
        return self._training.stopped

    def on_fit_end(self, history: list[dict[str, Any]]) -> None:
        for callback in self.callbacks:
            callback.on_fit_end(self._training, history)

    @property
    def _schedules(self) -> list[LearningRateSchedule]:
        return [callback for callback in self.callbacks if isinstance(callback, LearningRateSchedule)]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._training.optimizer.param_groups

    def _keep_state(self, *, weights: bool = False) -> Callable[[], None]:
        """Return what puts back all that callbacks may change. weights: those of the model as well."""
        states = copy.deepcopy([callback.state_dict() for callback in self.callbacks])
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._groups]
        model = self._module.copy(weights=weights)

        def restore() -> None:
            self._module.load(model, np.empty(0, np.uint8))
            for callback, state in zip(self.callbacks, states, strict=True):
                callback.load_state_dict(state)
            del self._groups[len(settings) :]  # which the callbacks have added
            for group, kept in zip(self._groups, settings, strict=True):
                group.update(kept)

        return restore

    def _follow_rank_0(self, group: Group) -> None:
        decided = np.array([self._training.stopped is not None, *(g["lr"] for g in self._groups)], np.float64)
        own = decided.copy()
        group.broadcast(decided, 0)
        if not decided[0]:
            self._training.stopped = None
        elif self._training.stopped is None:
            self._training.stopped = "rank 0 ended the training"
        for parameters, mine, rate in zip(self._groups, own[1:], decided[1:], strict=True):
            if mine != rate:
                parameters["lr"] = float(rate)
