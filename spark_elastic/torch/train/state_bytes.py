"""A captured training state as bytes, and back: torch's own format, read without unpickling anything but tensors and
plain values. Pure; any thread."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Phase, Position

ARRAY = "array of numpy's"  # the only key of a dict that stands for one


def dumps(captured: Mapping[str, Any]) -> bytes:
    """What `LearnerState.capture` gives, as bytes."""
    position, rng = captured["position"], captured["rng"]
    kind, words, *rest = rng["numpy"]
    plain = {
        **captured,
        "position": [position.epoch, position.phase.value, position.step],
        "rng": {**rng, "numpy": [kind, torch.from_numpy(words.astype(np.int64)), *rest]},
    }
    return values_dumps(plain)


def values_dumps(values: Mapping[str, Any]) -> bytes:
    """Tensors and plain values, such as a module's state dict with what `get_extra_state` gave."""
    return _saved(_plain(values, "the state"))


def values_loads(data: bytes) -> dict[str, Any]:
    """What `values_dumps` was given."""
    values: dict[str, Any] = _restored(_loaded(data))
    return values


def loads(data: bytes) -> dict[str, Any]:
    """What `LearnerState.load` takes."""
    plain = values_loads(data)
    epoch, phase, step = plain["position"]
    kind, words, *rest = plain["rng"]["numpy"]
    rng = {**plain["rng"], "numpy": (kind, words.numpy().astype(np.uint32), *rest)}
    return {**plain, "position": Position(epoch, Phase(phase), step), "rng": rng}


def readable(value: Any, name: str) -> None:
    """Raises:
    InvalidInput: a checkpoint that holds the value could not be read. name: whose it is.
    """
    _plain(value, name, tries=True)


def _plain(value: Any, name: str, tries: bool = False) -> Any:
    """As torch saves and reads it; numpy's numbers as Python's. tries: raise where it would not be read."""
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps OrderedDict and its metadata
        for key in value:
            plain = _plain(
                mapped.pop(key) if isinstance(key, np.generic) else value[key], f"{name}, at {key!r}", tries
            )
            mapped[key.item() if isinstance(key, np.generic) else key] = plain
        return mapped
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_plain(item, name, tries) for item in value)
    found = value
    if isinstance(value, np.generic):
        found = value.item()
    elif isinstance(value, np.ndarray):
        try:
            found = {ARRAY: torch.from_numpy(value.copy(order="C"))}
        except TypeError:
            raise _refused(value, name) from None
    if tries and not isinstance(found, torch.Tensor | dict | bool | int | float | str | None):
        try:
            _loaded(_saved(found))
        except (pickle.PickleError, TypeError, AttributeError, RuntimeError):
            raise _refused(value, name) from None
    return found


def _refused(value: Any, name: str) -> InvalidInput:
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    return InvalidInput(
        f"a checkpoint cannot hold the {kind} of {name}: keep numbers, strings, tensors, numpy arrays, lists, "
        "dicts and sets of them, or give a callback's attribute a name with a leading underscore."
    )


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {ARRAY}:
            return value[ARRAY].numpy()
        for key in value:
            value[key] = _restored(value[key])
        return value
    return type(value)(map(_restored, value)) if type(value) in (list, tuple) else value


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
