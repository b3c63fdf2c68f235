"""The state of a Keras training in one process: arrays and JSON, so nothing is ever unpickled.

It holds weights, the optimizer's variables (built before the first sync), the metrics' accumulators, the callbacks'
attributes, progress and position. Main thread only; the codec works in any thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.protocol.types import START, Position
from spark_elastic.runs.snapshot import ArrayRef, Bytes, Codec, Extent, Snapshot, SnapshotBuilder
from spark_elastic.training.progress import TrainingProgress

Array = npt.NDArray[Any]
ARRAY = "__array__"  # the only key of a dict that stands for an array in the snapshot's memory
SEED = "seed_generator_state"  # how the path of a random layer's state ends
ITEMS = "__items__"  # the only key of a dict that stands for one with numbers for keys, given as pairs


def to_json_tree(value: Any, builder: SnapshotBuilder) -> Any:
    """The value as JSON, with references to arrays, which the builder gets. Raises TypeError: it holds other things."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        (offset, nbytes), dtype, shape = builder.add_array(value)
        return {ARRAY: [offset, nbytes, dtype, list(shape)]}
    if isinstance(value, list | tuple):
        return [to_json_tree(item, builder) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json_tree(item, builder) for key, item in value.items()}
    if isinstance(value, dict) and all(isinstance(key, str | int | float | np.number) for key in value):
        return {ITEMS: [to_json_tree(pair, builder) for pair in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def from_json_tree(value: Any, memory: Bytes) -> Any:
    """The value that `to_json_tree` was given, with copies of the arrays; tuples come back as lists."""
    if isinstance(value, list):
        return [from_json_tree(item, memory) for item in value]
    if isinstance(value, Mapping):
        if set(value) == {ARRAY}:
            offset, nbytes, dtype, shape = value[ARRAY]
            return np.array(ArrayRef(Extent(offset, nbytes), dtype, tuple(shape)).of(memory))
        if set(value) == {ITEMS}:
            return dict(from_json_tree(pair, memory) for pair in value[ITEMS])
        return {key: from_json_tree(item, memory) for key, item in value.items()}
    return value


def is_plain(value: Any) -> bool:
    try:
        to_json_tree(value, SnapshotBuilder())
    except TypeError:
        return False
    return True


class JsonCodec:
    def dumps(self, values: Any) -> bytes:
        return json.dumps(values).encode()

    def loads(self, data: bytes, *, trusted: bool) -> Any:
        return json.loads(data)


class KerasTrainingState:
    codec: Codec = JsonCodec()

    def __init__(
        self, replicas: Sequence[Any], others: Sequence[Any], callbacks: Any, progress: TrainingProgress
    ) -> None:
        """replicas: equal on all ranks (P4). others: further variables. callbacks: with `capture` and `load`."""
        self._replicas, self._variables = list(replicas), [*replicas, *others]
        self._callbacks = callbacks
        self.progress = progress
        self.position: Position = START

    def capture(self, builder: SnapshotBuilder) -> dict[str, Any]:
        return {
            "variables": [to_json_tree(read_value(variable), builder) for variable in self._variables],
            "progress": to_json_tree(self.progress.to_values(), builder),
            "callbacks": to_json_tree(self._callbacks.capture(), builder),
        }

    def load(self, snapshot: Snapshot) -> None:
        values = from_json_tree(snapshot.values, snapshot.memory)
        for variable, array in zip(self._variables, values["variables"], strict=True):
            variable.assign(array)
        self.progress = TrainingProgress.from_values(values["progress"])
        self._callbacks.load(values["callbacks"])
        self.position = snapshot.position

    def digest(self) -> str:
        hasher = hashlib.sha256()
        for variable in self._replicas:
            hasher.update(np.ascontiguousarray(read_value(variable)).tobytes())
        return hasher.hexdigest()


def read_value(variable: Any) -> Array:
    """A Keras variable or tensor as an array; 16-bit floats as float32, which holds them exactly, and numpy writes."""
    value = np.asarray(variable)
    return value.astype(np.float32) if value.dtype.name in ("float16", "bfloat16") else value
