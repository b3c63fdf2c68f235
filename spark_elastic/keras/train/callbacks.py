"""Keras's own callbacks in an elastic training: each hook once for what became history, whatever resets happen (W6).

What a callback keeps in its attributes is part of the state, as far as it is plain values and arrays. Those that write
files run on rank 0 alone, and what they keep follows rank 0 after each epoch. `on_train_batch_end` comes once the step
is history, that is after the next one's `on_train_batch_begin`, and has only the loss. `on_test_batch_*` are not
called. Main thread only.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elastic_collectives import Group
from spark_elastic.keras.train.state import is_plain, plain, restored

_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger")
WRITERS = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
_FOREIGN = ("params", "model")  # belong to the training, not to the callback


class KerasCallbackList:
    """The callbacks of one worker, in order. See `training.trainer.CallbackList`."""

    def __init__(self, callbacks: Sequence[Any], model: Any, params: Mapping[str, Any]) -> None:
        """params: what Keras's callbacks are told of a training: epochs, steps, verbose."""
        self._callbacks = list(callbacks)
        self._model = model
        self._rank = 0
        self._epoch = -1  # that has begun
        self._step = [-1, -1]  # epoch and step that have begun
        self._tested = -1  # epoch whose validation has begun
        self._begun: set[int] = set()  # numbers of the callbacks that know that training began
        model.stop_training = False
        for callback in self._callbacks:
            callback.set_params(dict(params))
            callback.set_model(model)
        # Before a state is taken over, which holds what the others' callbacks have seen since.
        for number, callback in enumerate(self._callbacks):
            if not isinstance(callback, WRITERS):
                self._begin(number, callback)

    def captured(self) -> dict[str, Any]:
        """Attributes of all callbacks that are plain values and arrays."""
        begun = {"epoch": self._epoch, "step": list(self._step), "tested": self._tested}
        return {**begun, "kept": [_kept(callback) for callback in self._callbacks]}

    def load(self, captured: Mapping[str, Any]) -> None:
        self._epoch, self._step, self._tested = captured["epoch"], captured["step"], captured["tested"]
        for callback, kept in zip(self._callbacks, captured["kept"], strict=True):
            _put_back(callback, kept)

    def on_fit_begin(self, group: Group) -> None:
        """All that can has begun already."""

    def on_world_begin(self, group: Group) -> None:
        self._rank = group.rank
        for number, callback in enumerate(self._callbacks):
            if self._runs(callback) and number not in self._begun:
                if self._epoch >= 0:
                    self._take_over(number, callback)
                else:
                    self._begin(number, callback)

    def on_epoch_begin(self, epoch: int) -> None:
        if epoch > self._epoch:  # not again where a new world goes on with it
            self._epoch = epoch
            self._each("on_epoch_begin", epoch, {})

    def on_step_begin(self, epoch: int, step: int) -> None:
        if [epoch, step] != self._step:  # not again where it was given up
            self._step = [epoch, step]
            self._each("on_train_batch_begin", step, {})

    def on_validation_begin(self) -> None:
        if self._tested < self._epoch:
            self._tested = self._epoch
            self._each("on_test_begin", {})

    def on_step_applied(self) -> None:
        """Keras's schedules count the optimizer's iterations."""

    def on_step_finalized(self, logs: Mapping[str, Any]) -> None:
        self._each("on_train_batch_end", logs["step"], {"loss": logs["loss"]})

    def wants_stop(self) -> bool:
        return bool(self._model.stop_training)

    def on_epoch_end(self, group: Group, logs: Mapping[str, Any]) -> str | None:
        if not self._callbacks:
            return None
        before, rate, stop = json_copy(self.captured()), self._rate(), self._model.stop_training
        try:
            if self._tested == self._epoch >= 0:
                self._each("on_test_end", tested(logs))
            self._each("on_epoch_end", logs["epoch"], numbers(logs))
            self._follow_rank_0(group)
        except BaseException:
            self.load(before)
            self._model.stop_training = stop
            self._set_rate(rate)
            raise
        return "a callback set stop_training" if self._model.stop_training else None

    def on_fit_end(self, history: list[dict[str, Any]]) -> None:
        if history and self._model.optimizer.use_ema:
            self._model.optimizer.finalize_variable_values(self._model.trainable_variables)
        self._each("on_train_end", numbers(history[-1]) if history else {})

    def _begin(self, number: int, callback: Any) -> None:
        self._begun.add(number)
        callback.on_train_begin({})

    def _take_over(self, number: int, callback: Any) -> None:
        """A writer goes on, here, from what the former rank 0 kept."""
        kept = _kept(callback)
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True  # the rows that there are stay, where the path is a shared one
            kept = {name: value for name, value in kept.items() if name != "append_header"}
        self._begin(number, callback)
        callback.on_epoch_begin(self._epoch, {})
        if self._tested == self._epoch:
            callback.on_test_begin({})
        _put_back(callback, kept)

    def _each(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            if self._runs(callback):
                getattr(callback, hook)(*arguments)

    def _runs(self, callback: Any) -> bool:
        return self._rank == 0 or not isinstance(callback, WRITERS)

    def _follow_rank_0(self, group: Group) -> None:
        """Stop, learning rate and what writers keep."""
        writers = [_kept(c) if isinstance(c, WRITERS) else {} for c in self._callbacks]
        arrays: list[Any] = []
        decided = {
            "stop": bool(self._model.stop_training),
            "rate": self._rate(),
            "kept": plain(writers, arrays),
        }
        file = io.BytesIO()
        np.savez(file, *arrays, decided=np.frombuffer(json.dumps(decided).encode(), np.uint8))
        mine = file.getvalue() if group.rank == 0 else b""
        with np.load(io.BytesIO(group.allgather_bytes(mine)[0]), allow_pickle=False) as found:
            theirs = json.loads(found["decided"].tobytes())
            kept = restored(theirs["kept"], [found[f"arr_{n}"] for n in range(len(found.files) - 1)])
        self._model.stop_training = theirs["stop"]
        if theirs["rate"] != decided["rate"]:
            self._set_rate(theirs["rate"])
        for callback, attributes in zip(self._callbacks, kept, strict=True):
            _put_back(callback, attributes)

    def _rate(self) -> float | None:
        """None: a schedule of the optimizer's own, which callbacks cannot set."""
        optimizer = self._model.optimizer
        scheduled = isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
        return None if scheduled else float(np.asarray(optimizer.learning_rate))

    def _set_rate(self, rate: float | None) -> None:
        if rate is not None and rate != self._rate():
            self._model.optimizer.learning_rate = rate


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """What Keras calls logs: the epoch's losses and metrics."""
    ours = ("epoch", "rows", "planned", "steps", "seconds", "worlds", "val_rows")
    return {name: value for name, value in logs.items() if name not in ours}


def tested(logs: Mapping[str, Any]) -> dict[str, float]:
    """What Keras tells of a validation: losses and metrics without val_ before their names."""
    return {n.removeprefix("val_"): v for n, v in numbers(logs).items() if n.startswith("val_")}


def json_copy(captured: Mapping[str, Any]) -> Any:
    """A copy that later changes of attributes do not reach."""
    arrays: list[Any] = []
    return restored(plain(dict(captured), arrays), arrays)


def _kept(callback: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(callback).items() if n.lstrip("_") not in _FOREIGN and is_plain(v)}


def _put_back(callback: Any, kept: Mapping[str, Any]) -> None:
    """None does not take the place of what is no plain value: of what a callback opened since."""
    here = vars(callback)
    here.update({n: v for n, v in kept.items() if v is not None or is_plain(here.get(n))})
