"""The state of a torch training in one process: captured into snapshots, loaded from them, encoded for checkpoints.

Tensors lie in the snapshot's memory; the tree of values refers to them. Reading a checkpoint unpickles nothing but
tensors and plain values; a peer of the mesh has proved that it holds the job's key. Main thread only; the codec
works in any thread.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.host_memory import get_dtype_name
from spark_elastic.protocol.types import START, Position
from spark_elastic.runs.snapshot import Extent, Snapshot, SnapshotBuilder
from spark_elastic.training.progress import TrainingProgress, name_classes, pair_states
from spark_elastic.training.torch.buffers import rng_state, set_rng_state
from spark_elastic.training.torch.module_state import (
    ModelStateHandler,
    OptimizerStateHandler,
    TensorRef,
    Views,
    view_bytes,
    view_tensor,
)

# Keys of dicts of one entry that stand for ...
ARRAY = "numpy array"  # a numpy array, given as a tensor
TENSOR = "tensor in memory"  # a `TensorRef`: [offset, nbytes, dtype, shape, whether it was on the host]


def move_to_device(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move a model, whose parameters stay the same objects, and the state of its optimizer."""
    if all(tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
        return
    model.to(device)
    for group in optimizer.param_groups:
        # Else torch wants their counter on the host
        steps_there = group.get("fused") or group.get("capturable")
        for state in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (key != "step" or steps_there):
                    state[key] = value.to(device)


class TorchTrainingState:
    """Model, optimizer, learning-rate schedulers and callbacks, random generators, progress and position."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Any] = (),
        progress: TrainingProgress | None = None,
    ) -> None:
        """schedulers: anything with `state_dict` and `load_state_dict`."""
        self.model = model
        self.optimizer = optimizer
        self.module, self._optimizer = ModelStateHandler(model), OptimizerStateHandler(optimizer)
        self.module.keeps_parts = True
        self._optimizer.list_parameters = model.named_parameters
        # How the values of the ranks become one, by the name of a buffer that forward passes write: see `MERGES`.
        self.merges: dict[str, str] = {}
        self.schedulers = list(schedulers)
        self.progress = progress or TrainingProgress()
        self.position: Position = START

    @property
    def codec(self) -> TorchCodec:
        return TorchCodec()

    def capture(self, builder: SnapshotBuilder) -> dict[str, Any]:
        """See `TrainingState.capture`."""
        return {
            "model": self.module.capture(builder),
            "optimizer": self._optimizer.capture(builder),
            "schedulers": self._add_tensors([each.state_dict() for each in self.schedulers], builder),
            "classes": name_classes(self.schedulers),
            "progress": copy.deepcopy(self.progress.to_values()),
            "rng": self._add_tensors(rng_state(), builder),
            "merges": dict(self.merges),
        }

    def _add_tensors(self, values: Any, builder: SnapshotBuilder) -> Any:
        views = Views()

        def add(tensor: torch.Tensor) -> TensorRef:
            return TensorRef.of(tensor, views.put(builder, tensor, deferred=False))

        # The copy of what is no tensor; of dicts, lists and tuples these are copies already.
        return copy.deepcopy(_replace(values, torch.is_tensor, add))

    def load(self, snapshot: Snapshot) -> None:
        """Load a snapshot; parameters keep their identity."""
        memory, others = snapshot.memory, dict(snapshot.values)
        self.module.load(others.pop("model"), memory)
        self._optimizer.load(others.pop("optimizer"), memory)
        values = _replace(others, _is_ref, lambda ref: view_tensor(ref, memory).clone())
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


def _is_ref(value: Any) -> bool:
    return isinstance(value, TensorRef)


def _replace(value: Any, matches: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples, with everything that matches changed."""
    if matches(value):
        return change(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps OrderedDict and its metadata
        for key in value:
            mapped[key] = _replace(value[key], matches, change)
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_replace(item, matches, change) for item in value)
    return value


def _iter_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _iter_tensors(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _iter_tensors(item, f"{name}.{index}")


class TorchCodec:
    """Values in torch's own format."""

    def dumps(self, values: Any) -> bytes:
        return dump_values(_replace(values, _is_ref, _write_ref))

    def loads(self, data: bytes, *, trusted: bool) -> Any:
        values = _restore_arrays(_load(data, weights_only=not trusted))
        return _replace(values, lambda v: isinstance(v, dict) and v.keys() == {TENSOR}, _read_ref)


def _write_ref(ref: TensorRef) -> dict[str, Any]:
    assert isinstance(ref.extent, Extent)  # its snapshots keep no copies of their own
    return {TENSOR: [*ref.extent, get_dtype_name(ref.dtype), list(ref.shape), ref.on_host]}


def _read_ref(written: dict[str, Any]) -> TensorRef:
    offset, nbytes, dtype, shape, on_host = written[TENSOR]
    return TensorRef(Extent(offset, nbytes), getattr(torch, dtype), tuple(shape), on_host)


def dump_values(values: Mapping[str, Any]) -> bytes:
    """Encode tensors and plain values, such as a module's state dict with what `get_extra_state` returned."""
    return _save(_simplify(_replace(values, torch.is_tensor, torch.Tensor.cpu), "the state"))


def load_values(data: bytes) -> dict[str, Any]:
    """What `dump_values` encoded, from any source."""
    values: dict[str, Any] = _restore_arrays(_load(data, weights_only=True))
    return values


def check_storable(value: Any, name: str) -> None:
    """Raises InvalidInput if a checkpoint that holds the value could not be read.
    name: what the value belongs to, for the message."""
    _simplify(value, name, check=True)


def _simplify(value: Any, name: str, check: bool = False) -> Any:
    """The value as torch saves and reads it, with numpy's numbers as Python's.
    check: raise for what could be written but not read."""
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps OrderedDict and its metadata
        for key in value:
            if isinstance(key, np.generic):
                mapped[key.item()] = _simplify(mapped.pop(key), f"{name}, at {key!r}", check)
            else:
                mapped[key] = _simplify(value[key], f"{name}, at {key!r}", check)
        return mapped
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_simplify(item, name, check) for item in value)
    simple = value
    if isinstance(value, np.generic):
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


def _restore_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {ARRAY}:
            return value[ARRAY].numpy()
        for key in value:
            value[key] = _restore_arrays(value[key])
        return value
    return type(value)(map(_restore_arrays, value)) if type(value) in (list, tuple) else value


def _save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes, *, weights_only: bool) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
