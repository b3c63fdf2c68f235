"""The state of a torch training in one process: captured into snapshots, loaded from them, encoded for checkpoints.

Tensors lie in the snapshot's memory; the tree of values refers to them. Reading a checkpoint unpickles nothing but
tensors and plain values; a peer of the mesh has proved that it holds the job's key. Main thread only; the codec
works in any thread.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import CPU
from spark_elastic.gradients.host_memory import get_dtype_name
from spark_elastic.gradients.module_state import (
    ModelStateHandler,
    OptimizerStateHandler,
    TensorRef,
    Views,
    load_value,
    map_leaves,
    view_bytes,
)
from spark_elastic.protocol.types import START, Position
from spark_elastic.runs.snapshot import Codec, Extent, Snapshot, SnapshotBuilder
from spark_elastic.training.progress import TrainingProgress, name_classes, pair_states
from spark_elastic.training.torch.buffers import rng_state, set_rng_state

# Keys of dicts of one entry that stand for ...
ARRAY = "numpy array"  # a numpy array, given as a tensor
TENSOR = "tensor in memory"  # a `TensorRef`: [offset, nbytes, dtype, shape, whether it was on the host]


def move_to_device(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move a model, whose parameters stay the same objects, and the state of its optimizer."""
    if all(tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
        return
    model.to(device)
    for group in optimizer.param_groups:
        steps_there = group.get("fused") or group.get("capturable")  # else torch wants them on the host
        for state in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (key != "step" or steps_there):
                    state[key] = value.to(device)


class TorchCodec:
    def dumps(self, values: Any) -> bytes:
        return dump_values(values)

    def loads(self, data: bytes, *, trusted: bool) -> Any:
        return _restore(_load(data, weights_only=not trusted))


class TorchTrainingState:
    """Model, optimizer, learning-rate schedulers and callbacks, random generators, progress and position."""

    codec: Codec = TorchCodec()

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Any] = (),
        progress: TrainingProgress | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.module, self._optimizer = ModelStateHandler(model), OptimizerStateHandler(optimizer)
        self.module.keeps_parts = True
        self._optimizer.list_parameters = model.named_parameters
        self.merges: dict[str, str] = {}  # one of `MERGES`, by name of a buffer
        self.schedulers = list(schedulers)
        self.progress = progress or TrainingProgress()
        self.position: Position = START

    def capture(self, builder: SnapshotBuilder) -> dict[str, Any]:
        add = partial(Views().put_leaf, builder)
        return {
            "model": self.module.capture(builder),
            "optimizer": self._optimizer.capture(builder),
            "schedulers": map_leaves([each.state_dict() for each in self.schedulers], add),
            "classes": name_classes(self.schedulers),
            "progress": self.progress.to_values(),
            "rng": map_leaves(rng_state(), add),
            "merges": dict(self.merges),
        }

    def load(self, snapshot: Snapshot) -> None:
        memory, others = snapshot.memory, dict(snapshot.values)
        self.module.load(others.pop("model"), memory)
        self._optimizer.load(others.pop("optimizer"), memory)
        values = load_value(others, None, memory, CPU)
        for scheduler, state in pair_states(self.schedulers, values["classes"], values["schedulers"]):
            scheduler.load_state_dict(state)
        self.progress = TrainingProgress.from_values(values["progress"])
        set_rng_state(values["rng"])
        self.merges = values["merges"]
        self.position = snapshot.position

    def digest(self) -> str:
        """SHA-256 over all weights, buffers and optimizer tensors: equal on every replica (P4)."""
        hasher = hashlib.sha256()
        tensors = {**self.model.state_dict(), **dict(self.model.named_buffers())}
        values = {"model": tensors, "optimizer": self.optimizer.state_dict()}
        for name, tensor in _iter_tensors(values, ""):
            hasher.update(name.encode())
            hasher.update(view_bytes(tensor)[0].data)
        return hasher.hexdigest()


def _iter_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _iter_tensors(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _iter_tensors(item, f"{name}.{index}")


def dump_values(values: Mapping[str, Any]) -> bytes:
    """Encode tensors and plain values, such as a module's state dict with what `get_extra_state` returned."""
    return _save(_simplify(values, "the state"))


def load_values(data: bytes) -> dict[str, Any]:
    """What `dump_values` encoded, from any source."""
    values: dict[str, Any] = _restore(_load(data, weights_only=True))
    return values


def check_storable(value: Any, name: str) -> None:
    """Raises InvalidInput: a checkpoint that holds the value, which belongs to `name`, could not be read."""
    _simplify(value, name, check=True)


def _simplify(value: Any, name: str, check: bool = False) -> Any:
    """The value as torch saves and reads it. check: raise for what could be written but not read."""
    if isinstance(value, dict):
        return {
            key.item() if isinstance(key, np.generic) else key: _simplify(item, f"{name}, at {key!r}", check)
            for key, item in value.items()
        }
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_simplify(item, name, check) for item in value)
    simple = value
    if isinstance(value, TensorRef):
        assert isinstance(value.extent, Extent)  # its snapshots keep no copies of their own
        simple = {TENSOR: [*value.extent, get_dtype_name(value.dtype), list(value.shape), value.on_host]}
    elif isinstance(value, torch.Tensor):
        simple = value.cpu()
    elif isinstance(value, np.generic):
        simple = value.item()
    elif isinstance(value, np.ndarray):
        try:
            simple = {ARRAY: torch.from_numpy(value.copy(order="C"))}
        except TypeError:
            raise _build_not_storable_error(value, name) from None
    if check and not isinstance(simple, torch.Tensor | dict | bool | int | float | str | None):
        try:
            _load(_save(simple), weights_only=True)
        except (pickle.PickleError, TypeError, AttributeError, RuntimeError):
            raise _build_not_storable_error(value, name) from None
    return simple


def _build_not_storable_error(value: Any, name: str) -> InvalidInput:
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    return InvalidInput(
        f"a checkpoint cannot hold the {kind} of {name}: keep numbers, strings, tensors, numpy arrays, lists, "
        "dicts and sets of them, or give a callback's attribute a name with a leading underscore."
    )


def _restore(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {ARRAY}:
            return value[ARRAY].numpy()
        if value.keys() == {TENSOR}:
            offset, nbytes, dtype, shape, on_host = value[TENSOR]
            return TensorRef(Extent(offset, nbytes), getattr(torch, dtype), tuple(shape), on_host)
        return {key: _restore(item) for key, item in value.items()}
    return type(value)(map(_restore, value)) if type(value) in (list, tuple) else value


def _save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes, *, weights_only: bool) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
