"""The state of a Keras training in one process: variables as raw bytes, everything else as JSON; nothing is unpickled.

Weights, the optimizer's variables (built before the first sync), the metrics' accumulators, the callbacks' attributes,
the loop's values and the position. Main thread only; a copy's objects are made in any thread.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group
from spark_elastic.protocol.types import START, Phase, Position
from spark_elastic.training.trainer import Bytes, handed_over

# Values as JSON with arrays beside them, and back; what is neither is left out. Pure.


Array = npt.NDArray[Any]
_ARRAY = "__array__"


def plain(value: Any, arrays: list[Array]) -> Any:
    """The value with arrays put into `arrays`, and a number in their place.

    Raises:
        TypeError: it holds something else than numbers, text, lists, dicts with text for keys, and arrays.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        arrays.append(value.copy())
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [plain(item, arrays) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, arrays) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def restored(value: Any, arrays: Sequence[Array]) -> Any:
    """What `plain` was given; tuples as lists."""
    if isinstance(value, list):
        return [restored(item, arrays) for item in value]
    if isinstance(value, Mapping):
        if set(value) == {_ARRAY}:
            return np.array(arrays[value[_ARRAY]])
        return {key: restored(item, arrays) for key, item in value.items()}
    return value


def is_plain(value: Any) -> bool:
    """Whether `plain` takes it."""
    try:
        plain(value, [])
    except TypeError:
        return False
    return True


ARRAYS, VALUES = "state.npz", "state.json"


class KerasTrainingState:
    """replicas: variables that are equal on all ranks (P4). others: that travel as well. callbacks: whose `captured`
    and `load` give and take their attributes."""

    def __init__(
        self, replicas: Sequence[Any], others: Sequence[Any], callbacks: Any, extras: dict[str, Any]
    ) -> None:
        self._replicas, self._variables = list(replicas), [*replicas, *others]
        self._callbacks = callbacks
        self.extras = extras
        self.position: Position = START

    def copied(self) -> Callable[[], Mapping[str, bytes]]:
        captured = self._captured()
        return lambda: _objects(*captured)

    def restore(self, objects: Mapping[str, bytes]) -> None:
        with np.load(io.BytesIO(objects[ARRAYS]), allow_pickle=False) as arrays:
            self._load(json.loads(objects[VALUES]), [arrays[f"a{n}"] for n in range(len(arrays.files))])

    def sync(self, group: Group, source: int, receivers: Sequence[int]) -> Position:
        """Hand the state of rank `source` to `receivers`; collective over the whole group.

        Raises:
            CollectiveError: the group broke; the state is as it was.
            StoreError: what arrived is not what was sent; the state is as it was.
        """
        mine = None
        if group.rank == source:
            objects = _objects(*self._captured())
            mine = _bytes(objects[VALUES]), _bytes(objects[ARRAYS])
        arrived = handed_over(group, source, receivers, mine)
        if arrived is not None:
            self.restore({VALUES: arrived[0].tobytes(), ARRAYS: arrived[1].tobytes()})
        return self.position

    def digest(self) -> str:
        """SHA-256 over all weights and the optimizer's variables."""
        hasher = hashlib.sha256()
        for variable in self._replicas:
            hasher.update(np.ascontiguousarray(value_of(variable)).tobytes())
        return hasher.hexdigest()

    def _captured(self) -> tuple[bytes, list[Array]]:
        """The values as JSON, and copies of the arrays."""
        arrays = [np.array(value_of(variable)) for variable in self._variables]
        here = self.position
        values = {
            "position": [here.epoch, here.phase.value, here.step],
            "extras": plain(self.extras, arrays),
            "callbacks": plain(self._callbacks.captured(), arrays),
        }
        return json.dumps(values).encode(), arrays

    def _load(self, values: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        extras, callbacks = restored(values["extras"], arrays), restored(values["callbacks"], arrays)
        for variable, array in zip(self._variables, arrays, strict=False):
            variable.assign(array)
        self.extras.clear()
        self.extras.update(extras)
        self._callbacks.load(callbacks)
        epoch, phase, step = values["position"]
        self.position = Position(epoch, Phase(phase), step)


def value_of(variable: Any) -> Array:
    """A Keras variable as an array; 16-bit floats as float32, which holds them exactly."""
    value = np.asarray(variable)
    return value.astype(np.float32) if value.dtype.name in ("float16", "bfloat16") else value


def _objects(values: bytes, arrays: Sequence[Array]) -> dict[str, bytes]:
    file = io.BytesIO()
    np.savez(file, **{f"a{n}": array for n, array in enumerate(arrays)})  # type: ignore[arg-type]
    return {VALUES: values, ARRAYS: file.getvalue()}


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).copy()
