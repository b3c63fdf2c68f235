"""Keras's own callbacks in an elastic training: each hook is called once for each finalized step or epoch.

Attributes that are plain values and arrays are part of the state. Callbacks that write files run on rank 0 alone, and
their attributes follow it. `on_train_batch_end` is called once the step is final (R1, finalized steps), after the next
one's begin, with only the loss. `on_test_batch_*` are not called. Main thread only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elastic_collectives import Group
from spark_elastic.protocol.types import START
from spark_elastic.runs.snapshot import build_snapshot
from spark_elastic.training.keras.state import from_json_tree, is_plain, read_value, to_json_tree
from spark_elastic.training.progress import name_classes, pair_states
from spark_elastic.training.trainer import CallbackList

_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger")
WRITERS = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
_NOT_OWN = ("params", "model")  # attributes that belong to the training, not to the callback


class KerasCallbackList(CallbackList):
    """The callbacks of one worker, in order. See `training.trainer.CallbackList`."""

    def __init__(self, callbacks: Sequence[Any], model: Any, params: Mapping[str, Any]) -> None:
        """params: the `params` of Keras's callbacks: epochs, steps, verbose."""
        self._callbacks, self._model, self._rank = list(callbacks), model, 0
        self._epoch, self._step, self._tested = -1, [-1, -1], -1  # of which they were told; -1: none yet
        self._started: set[int] = set()  # numbers of the callbacks whose on_train_begin was called
        model.stop_training = False
        for callback in self._callbacks:
            callback.set_params(dict(params))
        for number, callback in enumerate(self._callbacks):  # before a state is taken over
            if not isinstance(callback, WRITERS):
                self._begin(number, callback)

    def capture(self) -> dict[str, Any]:
        progress = {"epoch": self._epoch, "step": list(self._step), "tested": self._tested}
        progress["stop"] = bool(self._model.stop_training)  # it travels with the next step
        attributes = [_list_attributes(callback) for callback in self._callbacks]
        return {**progress, "classes": name_classes(self._callbacks), "attributes": attributes}

    def load(self, values: Mapping[str, Any]) -> None:
        self._epoch, self._step, self._tested = values["epoch"], values["step"], values["tested"]
        self._model.stop_training = values["stop"]
        for callback, attributes in pair_states(self._callbacks, values["classes"], values["attributes"]):
            _set_attributes(callback, attributes)

    def on_world_begin(self, group: Group) -> None:
        self._rank = group.rank
        for number, callback in enumerate(self._callbacks):
            if self._runs(callback) and number not in self._started:
                (self._take_over if self._epoch >= 0 else self._begin)(number, callback)

    def on_epoch_begin(self, epoch: int) -> None:
        if epoch > self._epoch:  # a new world may continue an epoch that has begun
            self._epoch = epoch
            self._call_each("on_epoch_begin", epoch, {})

    def on_step_begin(self, epoch: int, step: int) -> None:
        if [epoch, step] != self._step:  # the step may be taken again
            self._step = [epoch, step]
            self._call_each("on_train_batch_begin", step, {})

    def on_validation_begin(self) -> None:
        if self._tested < self._epoch:
            self._tested = self._epoch
            self._call_each("on_test_begin", {})

    def on_step_finalized(self, logs: Mapping[str, Any]) -> None:
        self._call_each("on_train_batch_end", logs["step"], {"loss": logs["loss"]})

    def wants_stop(self) -> bool:
        return bool(self._model.stop_training)

    def on_epoch_end(self, group: Group, logs: dict[str, Any]) -> str | None:
        """Numbers that callbacks of rank 0 add to their `logs` are added to `logs`, too."""
        if not self._callbacks:
            return None
        before, stop = _decode(_encode(self.capture())), self._model.stop_training
        variables = [*self._model.weights, *self._model.optimizer.variables]  # SwapEMAWeights writes to them
        values = [np.array(read_value(variable)) for variable in variables]
        try:
            seen = build_keras_logs(logs)
            if self._tested == self._epoch >= 0:
                tested = {n.removeprefix("val_"): v for n, v in seen.items() if n.startswith("val_")}
                self._call_each("on_test_end", tested)
            self._call_each("on_epoch_end", logs["epoch"], seen)
            added = {name: _to_plain(value) for name, value in seen.items() if name not in logs}
            added = {name: value for name, value in added.items() if is_plain(value)}
            logs.update(self._follow_rank_0(group, added))
        except BaseException:
            self.load(before)
            self._model.stop_training = stop
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            raise
        return "a callback set stop_training" if self._model.stop_training else None

    def on_fit_end(self, history: list[dict[str, Any]]) -> None:
        if history:
            self._model.optimizer.finalize_variable_values(self._model.trainable_variables)
        self._call_each("on_train_end", build_keras_logs(history[-1]) if history else {})

    def _begin(self, number: int, callback: Any) -> None:
        self._started.add(number)
        callback.set_model(self._model)  # TensorBoard writes the graph
        callback.on_train_begin({})

    def _take_over(self, number: int, callback: Any) -> None:
        """A callback that writes continues here, with the attributes that it had on the former rank 0."""
        attributes = _list_attributes(callback)
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True  # keeps the rows of the former rank 0 where the path is a shared one
            attributes = {name: value for name, value in attributes.items() if name != "append_header"}
        self._begin(number, callback)
        callback.on_epoch_begin(self._epoch, {})
        if self._tested == self._epoch:
            callback.on_test_begin({})
        _set_attributes(callback, attributes)

    def _call_each(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            if self._runs(callback):
                getattr(callback, hook)(*arguments)

    def _runs(self, callback: Any) -> bool:
        return self._rank == 0 or not isinstance(callback, WRITERS)

    def _follow_rank_0(self, group: Group, added: Mapping[str, Any]) -> dict[str, Any]:
        """Take over rank 0's stop, rate and attributes of the callbacks that write. Returns what it added to logs."""
        attributes = [_list_attributes(c) if isinstance(c, WRITERS) else {} for c in self._callbacks]
        stop, rate = bool(self._model.stop_training), self._rate()
        decided = {"added": added, "stop": stop, "rate": rate, "attributes": attributes}
        theirs = _decode(group.allgather_bytes(_encode(decided) if group.rank == 0 else b"")[0])
        self._model.stop_training = theirs["stop"]
        if theirs["rate"] not in (None, rate):
            self._model.optimizer.learning_rate = theirs["rate"]
        for callback, attributes in zip(self._callbacks, theirs["attributes"], strict=True):
            _set_attributes(callback, attributes)
        return dict(theirs["added"])

    def _rate(self) -> float | None:
        """The learning rate; None: it has a schedule, which callbacks cannot set, or is a MultiOptimizer."""
        optimizer = self._model.optimizer
        scheduled = isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
        rate = None if scheduled else getattr(optimizer, "learning_rate", None)
        return None if rate is None else float(np.asarray(rate))


def build_keras_logs(logs: Mapping[str, Any]) -> dict[str, float]:
    """The `logs` of Keras's callbacks: losses and metrics of the epoch."""
    ours = ("epoch", "rows", "planned", "steps", "seconds", "worlds", "val_rows")
    return {name: value for name, value in logs.items() if name not in ours}


def _to_plain(value: Any) -> Any:
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def _encode(values: Mapping[str, Any]) -> bytes:
    snapshot = build_snapshot(START, lambda builder: to_json_tree(dict(values), builder))
    return json.dumps(snapshot.values).encode() + b"\n" + snapshot.memory.tobytes()


def _decode(data: bytes) -> Any:
    line, _, memory = data.partition(b"\n")
    return from_json_tree(json.loads(line), np.frombuffer(memory, np.uint8))


def _list_attributes(callback: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(callback).items() if n.lstrip("_") not in _NOT_OWN and is_plain(v)}


def _set_attributes(callback: Any, attributes: Mapping[str, Any]) -> None:
    """None does not replace an attribute that is no plain value, such as a file that the callback has opened since."""
    live = vars(callback)
    live.update({n: v for n, v in attributes.items() if v is not None or is_plain(live.get(n))})
    if "monitor_op" in live and isinstance(live.get("min_delta"), int | float):
        delta = abs(live["min_delta"])  # Keras turns its sign once, in the first epoch
        live["min_delta"] = -delta if live["monitor_op"] is keras.ops.less else delta
