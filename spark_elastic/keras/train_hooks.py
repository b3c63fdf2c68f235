"""Keras's own callbacks in an elastic training: each hook once for what became history, whatever resets happen (W6).

What a callback keeps in its attributes is part of the state, as far as it is plain values and arrays. Those that write
files run on rank 0 alone, and what they keep follows rank 0 behind each epoch. Main thread only.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elastic_collectives import Group
from spark_elastic.keras.train_values import is_plain, plain, restored

_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger")
WRITERS = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
_FOREIGN = ("params", "model")  # belong to the training, not to the callback


class KerasHooks:
    """The callbacks of one worker, in order. See `training.learner.Hooks`."""

    def __init__(self, callbacks: Sequence[Any], model: Any, params: Mapping[str, Any]) -> None:
        """params: what Keras's callbacks are told of a training: epochs, steps, verbose."""
        self._callbacks = list(callbacks)
        self._model = model
        self._rank = 0
        self._epoch = -1  # that has begun
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
        return {"epoch": self._epoch, "kept": [_kept(callback) for callback in self._callbacks]}

    def load(self, captured: Mapping[str, Any]) -> None:
        self._epoch = captured["epoch"]
        for callback, kept in zip(self._callbacks, captured["kept"], strict=True):
            vars(callback).update(kept)

    def begins(self, group: Group) -> None:
        """All that can has begun already."""

    def world(self, group: Group) -> None:
        self._rank = group.rank
        for number, callback in enumerate(self._callbacks):
            if self._runs(callback) and number not in self._begun:
                kept = _kept(callback)  # as the former rank 0 left it
                self._begin(number, callback)
                if self._epoch >= 0:
                    vars(callback).update(kept)

    def epoch_begins(self, epoch: int) -> None:
        if epoch > self._epoch:  # not again where a new world goes on with it
            self._epoch = epoch
            self._each("on_epoch_begin", epoch, {})

    def step_begins(self, epoch: int, step: int) -> None:
        self._each("on_train_batch_begin", step, {})

    def applied(self) -> None:
        """Keras's schedules count the optimizer's iterations."""

    def step_sealed(self, logs: Mapping[str, Any]) -> None:
        self._each("on_train_batch_end", logs["step"], {"loss": logs["loss"]})

    def ends(self) -> bool:
        return bool(self._model.stop_training)

    def epoch_ends(self, group: Group, logs: Mapping[str, Any]) -> str | None:
        if not self._callbacks:
            return None
        before, rate, stop = json_copy(self.captured()), self._rate(), self._model.stop_training
        try:
            self._each("on_epoch_end", logs["epoch"], numbers(logs))
            self._follow_rank_0(group)
        except BaseException:
            self.load(before)
            self._model.stop_training = stop
            self._set_rate(rate)
            raise
        return "a callback set stop_training" if self._model.stop_training else None

    def fit_ends(self, history: list[dict[str, Any]]) -> None:
        self._each("on_train_end", numbers(history[-1]) if history else {})

    def _begin(self, number: int, callback: Any) -> None:
        self._begun.add(number)
        callback.on_train_begin({})

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
            vars(callback).update(attributes)

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


def json_copy(captured: Mapping[str, Any]) -> Any:
    """A copy that later changes of attributes do not reach."""
    arrays: list[Any] = []
    return restored(plain(dict(captured), arrays), arrays)


def _kept(callback: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(callback).items() if n.lstrip("_") not in _FOREIGN and is_plain(v)}
