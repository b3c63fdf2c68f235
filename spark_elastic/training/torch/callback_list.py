"""Calls a training's callbacks, and makes all ranks follow the decisions of rank 0's callbacks (R6, step summary)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.callbacks import Callback, LearningRateSchedule, Training
from spark_elastic.training.torch.forward import BufferSnapshot
from spark_elastic.training.torch.module_state import find_difference, list_attributes


class _Copied(NamedTuple):
    """What callbacks may have changed, as it was before."""

    states: list[Any]  # of the callbacks
    settings: list[dict[str, Any]]  # of the optimizer's groups
    # What is frozen or evaluated, and plain attributes: owner, name, value
    attributes: list[tuple[Any, str, Any]]
    buffers: BufferSnapshot
    weights: list[tuple[torch.Tensor, torch.Tensor]]  # parameters and their values; []: they were not copied


class TorchCallbackList:
    """The callbacks of one worker, in order. Its own state is the newest epoch whose beginning theirs contains."""

    def __init__(
        self, callbacks: Sequence[Callback], model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.callbacks = list(callbacks)
        self._training = Training(model, optimizer)
        self._started = False
        self._group: Group | None = None  # of the world
        self._told = -1  # the newest epoch of which this worker's callbacks were told; -1: none yet
        self._begun = -1  # the newest epoch whose beginning the state of the callbacks contains; -1: none yet
        for callback in self._schedules:
            callback.bind(optimizer)

    def on_world_begin(self, group: Group) -> None:
        """Tell the callbacks their rank in the new world; a newcomer's training begins here."""
        self.on_fit_begin(group)

    def on_fit_begin(self, group: Group) -> None:
        """See `training.trainer.CallbackList`."""
        self._group = group
        self._training.rank, self._training.size = group.rank, group.size
        if not self._started:
            self._started = True
            for callback in self.callbacks:
                callback.on_fit_begin(self._training)

    def state_dict(self) -> dict[str, Any]:
        # A stop that a callback has asked for travels with the next step, which may be one of another driver.
        return {"epoch": self._begun, "stopped": self._training.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begun, self._training.stopped = state["epoch"], state["stopped"]

    def on_epoch_begin(self, epoch: int) -> None:
        """See `training.trainer.CallbackList`. In an epoch that others have begun, rates, callbacks and what is frozen
        come with the state, and the call is for what does not.

        Raises:
            InvalidInput: the ranks' models differ by what a callback has done; on all ranks alike.
        """
        joins = epoch <= self._begun
        if not joins or epoch > self._told:
            before, optimizer = self._copy_state(weights=True) if joins else None, self._training.optimizer
            self._told = self._begun = epoch
            if joins:  # groups come with the state, too
                optimizer.add_param_group = lambda param_group: None  # type: ignore[method-assign]
            try:
                for callback in self.callbacks:
                    callback.on_epoch_begin(self._training, epoch)
            finally:
                vars(optimizer).pop("add_param_group", None)
            if before is not None:
                self._restore(before)
        if self.callbacks and self._group is not None and self._group.size > 1:
            difference = find_difference(self._group, self._training.model)
            if difference is not None:
                raise InvalidInput(
                    f"{difference} in epoch {epoch + 1}: have callbacks do the same to the model on all workers."
                )

    def on_step_begin(self, epoch: int, step: int) -> None:
        for callback in self.callbacks:
            callback.on_step_begin(self._training, epoch, step)

    def on_step_applied(self) -> None:
        """Called in the apply section of a step: advances the learning rate schedules."""
        for callback in self._schedules:
            callback.advance_step()

    def on_step_finalized(self, logs: Mapping[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_step_end(self._training, logs)

    def wants_stop(self) -> bool:
        return self._training.stopped is not None

    def on_epoch_end(self, group: Group, logs: Mapping[str, Any]) -> str | None:
        """Why training is to end, or None.

        Raises:
            CollectiveError: the group broke; the callbacks are as before, so that the epoch can be closed again.
        """
        if not self.callbacks:
            return None
        before = self._copy_state()
        stopped = self._training.stopped  # by `on_step_end`, which is not called again
        try:
            for callback in self.callbacks:
                callback.on_epoch_end(self._training, logs)
            self._follow_rank_0(group)
        except BaseException:
            self._restore(before)
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

    def _copy_state(self, weights: bool = False) -> _Copied:
        """weights: those of the model as well."""
        states = copy.deepcopy([callback.state_dict() for callback in self.callbacks])
        model = self._training.model
        parts = dict(model.named_modules())
        flags: list[tuple[Any, str, Any]] = [
            (p, "requires_grad", p.requires_grad) for p in model.parameters()
        ]
        flags += [(part, "training", part.training) for part in parts.values()]
        held = copy.deepcopy(list_attributes(parts.items()))
        return _Copied(
            states,
            [{k: v for k, v in group.items() if k != "params"} for group in self._groups],
            [*flags, *((parts[path], name, value) for (path, name), value in held.items())],
            BufferSnapshot(model, parts.values()),
            [(p, p.detach().clone()) for p in model.parameters()] if weights else [],
        )

    def _restore(self, before: _Copied) -> None:
        before.buffers.restore(attributes=False)
        with torch.no_grad():
            for parameter, values in before.weights:
                parameter.copy_(values)
        for owner, name, value in before.attributes:
            setattr(owner, name, value)
        for callback, state in zip(self.callbacks, before.states, strict=True):
            callback.load_state_dict(state)
        del self._groups[len(before.settings) :]  # which the callbacks have added
        for parameters, settings in zip(self._groups, before.settings, strict=True):
            parameters.update(settings)

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
