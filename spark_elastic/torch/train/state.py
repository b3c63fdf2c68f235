"""The state of a training run in one process, and how a newcomer or laggard takes it over.

Tensors travel as raw bytes into staging; they are verified by checksum and then swapped in together with the
position (R5), so that a sync that breaks leaves the old state whole. The rest of the state is pickled: it comes from
an authenticated peer of the mesh only. Main thread only.
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

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import START, Phase, Position
from spark_elastic.torch.train.snapshot import rng_state, set_rng_state
from spark_elastic.training.trainer import Bytes, handed_over

# A captured training state as bytes, and back: torch's own format, read without unpickling anything but tensors and
# plain values. Pure; any thread.


ARRAY = "array of numpy's"  # the only key of a dict that stands for one


def dumps(captured: Mapping[str, Any]) -> bytes:
    """What `TorchTrainingState.capture` gives, as bytes."""
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
    """What `TorchTrainingState.load` takes."""
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


PART = "state.pt"
ALIGN = 64  # bytes; every tensor begins aligned in the staging memory


class _Place:
    """Stands for a tensor in the pickled rest."""

    def __init__(self, tensor: torch.Tensor, offset: int) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.offset, self.nbytes = offset, tensor.numel() * tensor.element_size()


class TorchTrainingState:
    """Model, optimizer, learning-rate schedulers, extra values by name, random generators, and the position.

    Everything it holds is part of what a joiner receives; `extras` must pickle.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Any] = (),
        **extras: Any,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedulers = list(schedulers)
        self.extras = extras
        self.position: Position = START

    def capture(self) -> dict[str, Any]:
        """References to all there is, not copies."""
        model = self.model.state_dict()
        return {
            "model": model,
            "unsaved": {n: b for n, b in self.model.named_buffers() if n not in model},  # persistent=False
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "extras": self.extras,
            "rng": rng_state(),
            "position": self.position,
        }

    def load(self, captured: dict[str, Any]) -> None:
        """Make the captured state this one's; parameters keep their identity."""
        self.model.load_state_dict(captured["model"])
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in captured["unsaved"].items():
                buffers[name].copy_(value)
        _load_optimizer(self.optimizer, captured["optimizer"])
        for scheduler, state in zip(self.schedulers, captured["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.extras = captured["extras"]
        set_rng_state(captured["rng"])
        self.position = captured["position"]

    def copied(self) -> Callable[[], Mapping[str, bytes]]:
        """A copy of all there is, as a function that makes objects of it."""
        captured = copy.deepcopy(self.capture())
        return lambda: {PART: dumps(captured)}

    def restore(self, objects: Mapping[str, bytes]) -> None:
        """Take over what such a function made."""
        self.load(loads(objects[PART]))

    def sync(self, group: Group, source: int, receivers: Sequence[int]) -> Position:
        """Hand the state of rank `source` to `receivers`; collective over the whole group.

        Raises:
            CollectiveError: the group broke; the state is as it was.
            StoreError: what arrived is not what was sent; the state is as it was.
        """
        sends = group.rank == source
        mine = _pack(self.capture()) if sends else None
        arrived = handed_over(group, source, receivers, mine)
        if arrived is not None:
            self.load(_unpack(*arrived))
        return self.position

    def digest(self) -> str:
        """SHA-256 over all weights, buffers and optimizer tensors: equal on every replica (P4)."""
        hasher = hashlib.sha256()
        captured = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        for name, tensor in _tensors(captured, ""):
            hasher.update(name.encode())
            hasher.update(_bytes_of(tensor).data)
        return hasher.hexdigest()


def _load_optimizer(optimizer: torch.optim.Optimizer, captured: dict[str, Any]) -> None:
    """Bit by bit: torch casts an optimizer's tensors to its parameters' dtype, which loses counters and precision."""
    optimizer.load_state_dict(captured)
    numbers = [number for group in captured["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in captured["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and optimizer.state[parameter][key].dtype != value.dtype:
                optimizer.state[parameter][key] = value.clone()


def _pack(captured: dict[str, Any]) -> tuple[Bytes, Bytes]:
    """(pickled rest with places for tensors, the tensors' bytes)."""
    tensors: list[tuple[_Place, torch.Tensor]] = []
    end = 0

    def place(tensor: torch.Tensor) -> _Place:
        nonlocal end
        held = _Place(tensor, end)
        tensors.append((held, tensor))
        end = -(-(end + held.nbytes) // ALIGN) * ALIGN
        return held

    rest = pickle.dumps(_map(captured, torch.Tensor, place))
    staging = np.zeros(end, np.uint8)
    for held, tensor in tensors:
        staging[held.offset : held.offset + held.nbytes] = _bytes_of(tensor)
    return np.frombuffer(rest, np.uint8).copy(), staging


def _unpack(rest: Bytes, staging: Bytes) -> dict[str, Any]:
    memory = torch.from_numpy(staging)

    def tensor(held: _Place) -> torch.Tensor:
        flat = memory[held.offset : held.offset + held.nbytes]
        return flat.view(held.dtype).view(held.shape).clone()

    captured: dict[str, Any] = _map(pickle.loads(rest.tobytes()), _Place, tensor)
    return captured


def _map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples with every `kind` changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps OrderedDict and its metadata
        for key in value:
            mapped[key] = _map(value[key], kind, change)
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_map(item, kind, change) for item in value)
    return value


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}")


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy() if dense.numel() else np.empty(0, np.uint8)
