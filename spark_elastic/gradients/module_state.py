"""What a training depends on of its modules and optimizers: the one definition for estimators, elastic loops and the
trainers of other libraries.

Of a module: parameters and which of them are frozen, which parts are in evaluation mode, every buffer, also those that
training has registered, grown or replaced, plain public attributes that it has changed, and extra state. Of an
optimizer: which parameters its groups hold, by name, their settings, and the state of each. Training thread only.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import CPU, SnapshotCopy
from spark_elastic.runs.handlers import SnapshotHandler
from spark_elastic.runs.snapshot import Bytes, Extent, Kept, SnapshotBuilder

_SAMPLES = 16  # elements of a frozen parameter that are compared before each commit


class FrozenCopies:
    """The copies, until their parameters change. A possible change is seen by the parameter's version and memory, and,
    since writing through `.data` leaves no such trace, by some of its elements. A parameter that has changed once, as
    that of a moving average, is copied each time."""

    def __init__(self) -> None:
        # By the parameter's id: itself, its memory and version, elements of it, and the copy.
        self._kept: dict[int, tuple[Tensor, tuple[int, int], Tensor, Kept]] = {}
        self._moving: set[int] = set()
        self._is_first = True  # what is frozen now, each process makes

    def take(self, frozen: Mapping[str, Tensor]) -> dict[int, Kept]:
        """The copies of these parameters, by id; without those that change."""
        held = {name: p for name, p in frozen.items() if id(p) not in self._moving and p.numel()}
        former, self._kept = self._kept, {}
        for (name, tensor), sample in zip(held.items(), _sample(held.values()), strict=True):
            place, known = (tensor.data_ptr(), tensor._version), former.get(id(tensor))
            if known is None or known[0] is not tensor:
                known = tensor, place, sample, _copy(name, tensor, self._is_first)
            elif known[1] != place or not torch.equal(known[2], sample):
                if _make_key(name, view_bytes(tensor)[0]) != known[3].key:
                    self._moving.add(id(tensor))
                    continue
                known = tensor, place, sample, known[3]  # it has gone to another device
            self._kept[id(tensor)] = known
        self._is_first = False
        return {key: known[3] for key, known in self._kept.items()}

    def list_copies(self) -> dict[tuple[str, int, int], Kept]:
        return {kept.key: kept for *_, kept in self._kept.values()}

    def holds(self, tensor: Tensor, kept: Kept) -> bool:
        known = self._kept.get(id(tensor))
        if known is None or known[3].key != kept.key or known[1] != (tensor.data_ptr(), tensor._version):
            return False
        (sample,) = _sample([tensor])
        return torch.equal(known[2], sample)

    def put(self, tensor: Tensor, kept: Kept) -> None:
        (sample,) = _sample([tensor])
        self._kept[id(tensor)] = tensor, (tensor.data_ptr(), tensor._version), sample, kept


def _copy(name: str, tensor: Tensor, is_made: bool) -> Kept:
    memory, shared = view_bytes(tensor)
    return Kept(_make_key(name, memory), memory.copy() if shared else memory, is_made)


def _make_key(name: str, memory: Bytes) -> tuple[str, int, int]:
    return name, memory.nbytes, zlib.crc32(memory.data)


def _sample(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    taken = [
        each.detach().as_strided((min(each.numel(), _SAMPLES),), (max(each.numel() // _SAMPLES, 1),)).double()
        for each in tensors
    ]
    if not taken:
        return ()
    sizes = [len(each) for each in taken]
    return torch.split(torch.cat(taken).cpu().view(torch.int64), sizes)


def view_bytes(tensor: Tensor) -> tuple[Bytes, bool]:
    """Return (its bytes, whether they are the tensor's own memory and not a copy)."""
    if hasattr(tensor, "to_local"):  # a DTensor
        raise InvalidInput(
            "a DTensor has a part of its values on each worker, and TorchState holds whole models: divide the model by "
            "fully_shard and use FSDPState."
        )
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if not dense.numel():
        return np.empty(0, np.uint8), False
    return dense.view(torch.uint8).numpy(), dense.data_ptr() == tensor.data_ptr()


PLAIN = {bool, int, float, str, type(None)}  # types of the attributes that are part of the state
_FEW = 64  # most entries of a list, tuple or dict of them; looking through more before each commit would take long


class TensorRef(NamedTuple):
    extent: Extent | Kept  # its bytes in the memory of the snapshot, or a copy that many snapshots share
    dtype: torch.dtype  # with which these bytes are viewed
    shape: tuple[int, ...]  # () for a scalar
    on_host: bool  # False: it was on the device that the process trains on

    @classmethod
    def of(cls, tensor: Tensor, extent: Extent | Kept) -> TensorRef:
        return cls(extent, tensor.dtype, tuple(tensor.shape), tensor.device == CPU)


class Buffer(NamedTuple):
    """A place for a buffer in a module."""

    owner: Module  # the module that has it
    name: str  # in that module
    tensor: Tensor | None  # None: it is not set

    @property
    def is_saved(self) -> bool:
        return self.name not in self.owner._non_persistent_buffers_set


Parts = Iterable[tuple[str, Module]]


def list_buffers(model: Module, parts: Parts | None = None) -> dict[str, Buffer]:
    """All buffers by name, also those that two modules share, and those that are not set. parts: of `named_modules`."""
    return {
        f"{path}.{own}" if path else own: Buffer(module, own, buffer)
        for path, module in (model.named_modules() if parts is None else parts)
        for own, buffer in module._buffers.items()
    }


def put_buffer(model: Module, name: str, value: Tensor | None, *, is_saved: bool) -> None:
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    owner._buffers[own] = value
    (owner._non_persistent_buffers_set.discard if is_saved else owner._non_persistent_buffers_set.add)(own)


class Views:
    """Views of tensors as bytes, cached while a tensor stays in its memory: to make one costs microseconds."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Bytes, Callable[[], int]]] = {}
        self._former = self._known

    def begin(self) -> None:
        """A capture begins; only tensors of this and of the former one stay known."""
        self._former, self._known = self._known, {}

    def put(self, builder: SnapshotBuilder, tensor: Tensor, *, deferred: bool) -> Extent:
        known = self._former.get(id(tensor)) or self._known.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != tensor.data_ptr():
            if tensor.device != CPU and not hasattr(tensor, "to_local"):
                copied = SnapshotCopy(tensor.device)  # this thread waits once, for the copies of all tensors
                builder.allocate, builder.wait_remote = copied.allocate, copied.wait
                return builder.add_remote(tensor.nbytes, partial(copied.begin, tensor.detach()))
            memory, shared = view_bytes(tensor)
            if not shared:
                return builder.add(memory)
            known = tensor, tensor.data_ptr(), memory, lambda: tensor._version
        self._known[id(tensor)] = known
        return builder.add(known[2], known[3] if deferred else None)

    def put_leaf(self, builder: SnapshotBuilder, leaf: Any, *, deferred: bool = False) -> Any:
        """The reference to a tensor; a copy of anything else."""
        if isinstance(leaf, Tensor):
            return TensorRef.of(leaf, self.put(builder, leaf, deferred=deferred))
        return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else copy.deepcopy(leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples, with what `change` makes of all else."""
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, change) for item in value)
    return change(value)


class ModelStateHandler(SnapshotHandler):
    """A module: see the top of this file."""

    def __init__(self, value: Module) -> None:
        super().__init__(value)
        self.trained: set[int] = set()  # ids of the parameters that may be copied in the background
        self.frozen: FrozenCopies | None = None  # for snapshots that are pickled
        self.keeps_parts = False  # it has the same parameters and layers from beginning to end
        self._views = Views()
        self._begin_with_model()

    def set_value(self, value: Module) -> None:
        super().set_value(value)
        self._begin_with_model()

    def _begin_with_model(self) -> None:
        # Parameters do not tell: use_orig_params=True shows them as they were.
        if any(is_of(m, "torch.distributed.fsdp", "FullyShardedDataParallel") for m in self.value.modules()):
            raise InvalidInput(
                "FullyShardedDataParallel leaves a part of the model on each worker, and TorchState holds whole "
                "models: divide it by fully_shard and use FSDPState."
            )
        parts, plain = list(self.value.named_modules()), Module.get_extra_state
        self._extra = [(name, part) for name, part in parts if type(part).get_extra_state is not plain]
        self._first_buffers = frozenset(list_buffers(self.value))  # those registered later are the training's
        self._first_attributes = copy.deepcopy(list_attributes(parts))
        self._first_parts = _name_parts(parts, self.value.named_parameters())
        self._evaluated: list[str] | None = None  # parts in evaluation mode outside of `evaluate`

    def parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        model: Module = self.value
        return model.named_parameters()

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Inside, the model is in evaluation mode, which is no part of its state."""
        parts = dict(self.value.named_modules())
        self._evaluated = [name for name, part in parts.items() if not part.training]
        self.value.eval()
        try:
            yield
        finally:
            self.value.train()
            for name in self._evaluated:
                parts[name].training = False
            self._evaluated = None

    def capture(self, builder: SnapshotBuilder) -> Any:
        self._views.begin()
        frozen = {name: p for name, p in self.parameters() if not p.requires_grad}
        kept = {} if self.frozen is None else self.frozen.take(frozen)

        def put(tensor: Tensor) -> TensorRef:
            key = id(tensor)
            extent = kept.get(key) or self._views.put(builder, tensor, deferred=key in self.trained)
            return TensorRef.of(tensor, extent)

        return self._collect(put)

    def export(self) -> dict[str, Any]:
        """What `capture` returns, with the live tensors themselves."""
        return self._collect(lambda tensor: tensor.detach())

    def copy(self, *, weights: bool) -> dict[str, Any]:
        """What `export` returns, with copies of the buffers and, if wanted, of the parameters; for `load`."""
        live = () if weights else set(map(id, self.value.parameters()))
        return self._collect(lambda each: each.detach() if id(each) in live else each.detach().clone())

    def _check_parts(self, now: dict[str, type | None]) -> None:
        before = self._first_parts
        # A layer without parameters that forward makes when it is first called is made by all.
        odd = {name for name in before if name not in now or now[name] is not before[name]}
        odd |= {name for name, kind in now.items() if kind is None and name not in before}
        if odd:
            name = min(odd)
            what = "layer" if {**now, **before}[name] else "parameter"
            raise InvalidInput(
                f"training has added, removed or replaced the {what} {name!r} of the model (as a callback does that "
                "prunes or swaps layers), which others and the fitted model cannot take over: build it before the fit."
            )

    def _collect(self, put: Callable[[Tensor], Any]) -> dict[str, Any]:
        named, parts = list(self.parameters()), list(self.value.named_modules())
        if self.keeps_parts:
            self._check_parts(_name_parts(parts, named))
        buffers = list_buffers(self.value, parts)
        evaluated = [name for name, part in parts if not part.training]
        first = self._first_attributes
        return {
            "parameters": {name: put(parameter) for name, parameter in named},
            "frozen": [name for name, parameter in named if not parameter.requires_grad],
            "evaluated": evaluated if self._evaluated is None else self._evaluated,
            "buffers": {n: None if b.tensor is None else put(b.tensor) for n, b in buffers.items()},
            "removed": sorted(self._first_buffers - buffers.keys()),
            "unsaved": [name for name, buffer in buffers.items() if not buffer.is_saved],
            "attributes": [
                (*place, copy.deepcopy(value))
                for place, value in list_attributes(parts).items()
                if place not in first or first[place] != value
            ],
            "extra": {name: copy.deepcopy(module.get_extra_state()) for name, module in self._extra},
        }

    def load(self, values: Any, memory: Bytes) -> None:
        parameters = dict(self.parameters())
        _check_same(parameters, values["parameters"])
        frozen, evaluated = set(values["frozen"]), set(values["evaluated"])
        with torch.no_grad():
            for name, ref in values["parameters"].items():
                self._load_parameter(parameters[name], ref, memory)
                if parameters[name].requires_grad == (name in frozen):
                    parameters[name].requires_grad_(name not in frozen)
            self._load_buffers(values, memory)
        parts = dict(self.value.named_modules())
        for name, part in parts.items():
            part.training = name not in evaluated
        saved = {(path, name): value for path, name, value in values["attributes"]}
        for (path, name), value in {**self._first_attributes, **saved}.items():
            if path in parts and (name not in vars(parts[path]) or vars(parts[path])[name] != value):
                setattr(parts[path], name, copy.deepcopy(value))
        for name, module in self._extra:
            module.set_extra_state(copy.deepcopy(values["extra"][name]))

    def _load_parameter(self, parameter: Tensor, ref: Any, memory: Bytes) -> None:
        kept = ref.extent if isinstance(ref, TensorRef) and isinstance(ref.extent, Kept) else None
        if kept is None or self.frozen is None:
            parameter.copy_(view_tensor(ref, memory))
        elif not self.frozen.holds(parameter, kept):
            kept.take_from(self.frozen.list_copies())
            parameter.copy_(view_tensor(ref, memory))
            self.frozen.put(parameter, kept)

    def _load_buffers(self, values: Mapping[str, Any], memory: Bytes) -> None:
        saved, unsaved, removed = values["buffers"], set(values["unsaved"]), set(values.get("removed", ()))
        device = find_device((*self.value.parameters(), *self.value.buffers()))
        live = list_buffers(self.value)
        registered = live.keys() - saved.keys() - self._first_buffers  # since the commit
        for name in registered | (removed & live.keys()):
            delattr(live[name].owner, live[name].name)
        for name, ref in saved.items():
            buffer = live[name].tensor if name in live else None
            fits = buffer is not None and ref is not None and _are_alike(buffer, ref)
            if buffer is None or not fits or 0 in buffer.stride():  # expanded
                value = None if ref is None else load_value(ref, None, memory, device)
                put_buffer(self.value, name, value, is_saved=name not in unsaved)
            else:
                buffer.copy_(view_tensor(ref, memory))


def _name_parts(parts: Parts, parameters: Iterable[tuple[str, Any]]) -> dict[str, type | None]:
    """What all processes build alike: layers and their classes, and parameters, which have None."""
    return {**{name: type(part) for name, part in parts}, **{name: None for name, _ in parameters}}


def list_attributes(parts: Parts) -> dict[tuple[str, str], Any]:
    """Public attributes of plain values by (path of the module, name)."""
    return {
        (path, name): value
        for path, part in parts
        for name, value in vars(part).items()
        if name[0] != "_" and name != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple, dict):
        entries = (*value, *value.values()) if kind is dict else value
        return len(value) <= _FEW and all(map(_is_plain, entries))
    return kind in PLAIN or isinstance(value, np.generic)


class OptimizerStateHandler(SnapshotHandler):
    """Groups, settings and state of an optimizer; what `state_dict` returns, if its class has one of its own."""

    def __init__(self, value: Optimizer) -> None:
        super().__init__(value)
        # Returns all parameters that a group may hold, by names that are the same in all processes.
        self.list_parameters: Callable[[], Iterable[tuple[str, torch.nn.Parameter]]] = lambda: ()
        self._views = Views()

    @property
    def has_own_format(self) -> bool:
        """Whether the optimizer's class has a `state_dict` or `load_state_dict` of its own."""
        kind = type(self.value)
        places = [method.__module__ for method in (kind.state_dict, kind.load_state_dict)]
        return not all(place.startswith(("torch.optim.", "accelerate.")) for place in places)

    def capture(self, builder: SnapshotBuilder) -> Any:
        if is_of(self.value, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            raise InvalidInput(
                "a ZeroRedundancyOptimizer keeps on each worker another part of its state, which a loss would take "
                "along: use the optimizer that it wraps, or divide the model by fully_shard and use FSDPState."
            )
        self._views.begin()
        names = self._name_groups()
        if self.has_own_format:
            return names, self._add_tensors(self.value.state_dict(), builder, deferred=False)
        groups, state = self.value.param_groups, self.value.state
        plain = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        settings = self._add_tensors(plain, builder, deferred=False)
        others = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        parameters = [p for group in groups for p in group["params"]]
        states = [self._add_tensors(state.get(p), builder, deferred=True) for p in parameters]
        return names, settings, states, self._add_tensors(others, builder, deferred=False)

    def load(self, values: Any, memory: Bytes) -> None:
        names, *rest = values
        self._restore_groups(names)
        groups, state = self.value.param_groups, self.value.state
        device = find_device(p for group in groups for p in group["params"])
        if self.has_own_format:
            self.value.load_state_dict(load_value(rest[0], None, memory, device))
            inner = find_hooked(self.value)
            if self.value.param_groups is not inner.param_groups:
                self.value.param_groups = inner.param_groups  # `load_state_dict` has made new ones
            return
        settings, states, others = rest
        for group, saved in zip(groups, settings, strict=True):
            for key, value in saved.items():
                group[key] = load_value(value, group.get(key), memory, device)
        for parameter, saved in zip((p for g in groups for p in g["params"]), states, strict=True):
            if saved is None:
                state.pop(parameter, None)
            else:
                state[parameter] = load_value(saved, state.get(parameter), memory, parameter.device)
        for key in [key for key in state if not isinstance(key, Tensor) and key not in others]:
            del state[key]
        for key, saved in others.items():
            state[key] = load_value(saved, state.get(key), memory, device)

    def _name_groups(self) -> list[list[str | None]]:
        """The names of the parameters of each group; None: a parameter that has none."""
        known = {id(parameter): name for name, parameter in self.list_parameters()}
        return [[known.get(id(p)) for p in group["params"]] for group in self.value.param_groups]

    def _restore_groups(self, saved: list[list[str | None]]) -> None:
        """Let the groups hold what they held when the state was saved, whatever has changed them since."""
        optimizer, mine = self.value, self._name_groups()
        if mine == saved and all(name is not None for group in saved for name in group):
            return
        groups = optimizer.param_groups
        del groups[len(saved) :]
        if mine[: len(saved)] != saved:
            parameters = dict(self.list_parameters())
            lacking = [name for group in saved for name in group if name not in parameters]
            if lacking:
                here = sum(len(group["params"]) for group in groups)
                raise InvalidInput(
                    f"the workers' optimizers differ ({here} parameters in {len(groups)} groups here, "
                    f"{sum(map(len, saved))} in {len(saved)} there): give the state the model whose parameters they "
                    "train, and build the same model and optimizer on each worker."
                )
            for number, names in enumerate(saved):
                own = [parameters[name] for name in names if name is not None]
                if number < len(groups):
                    groups[number]["params"] = own
                else:
                    like = {k: v for k, v in groups[0].items() if k not in ("params", "param_names")}
                    named = [(str(name), parameters[str(name)]) for name in names]
                    given = named if "param_names" in groups[0] else own
                    optimizer.add_param_group({**like, "params": given})
        held = {id(parameter) for group in groups for parameter in group["params"]}
        for key in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in held]:
            del optimizer.state[key]
        follow = getattr(optimizer, "follow_groups", None)  # a DistributedOptimizer exchanges what it trains
        if follow is not None:
            follow()

    def reset(self) -> None:
        self.value.zero_grad()

    def _add_tensors(self, values: Any, builder: SnapshotBuilder, *, deferred: bool) -> Any:
        return map_leaves(values, lambda leaf: self._add_leaf(leaf, builder, deferred=deferred))

    def _add_leaf(self, leaf: Any, builder: SnapshotBuilder, *, deferred: bool) -> Any:
        return self._views.put_leaf(builder, leaf, deferred=deferred)


def find_hooked(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself; that within a wrapper without hooks of its own, such as Accelerate's."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer):
            return find_hooked(inner)
    raise InvalidInput(
        f"{type(optimizer).__name__} has neither step hooks nor an optimizer with them as `optimizer` or `optim`: call "
        "Optimizer.__init__ in its __init__."
    )


def multiply_rates(optimizer: Optimizer, times: int) -> None:
    """Multiply every group's learning rate, and the first rate that a scheduler made before has noted."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * times


def find_device(tensors: Iterable[Tensor]) -> torch.device:
    """Where they are that are not on the host."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


def load_value(saved: Any, live: Any, memory: Bytes, device: torch.device) -> Any:
    """The value that was saved, in the live tensor if it fits. device: for tensors that were not on the host."""
    if isinstance(saved, TensorRef | Tensor):
        arrived = view_tensor(saved, memory)
        if isinstance(live, Tensor) and _are_alike(live, arrived):
            with torch.no_grad():
                return live.copy_(arrived)
        on_host = isinstance(saved, Tensor) or saved.on_host
        return arrived.clone() if on_host else arrived.to(device, copy=True)
    if isinstance(saved, dict):
        known = live if isinstance(live, dict) else {}
        return {key: load_value(item, known.get(key), memory, device) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(load_value(item, None, memory, device) for item in saved)
    return copy.deepcopy(saved)


def _are_alike(tensor: Tensor, ref: TensorRef | Tensor) -> bool:
    return (tuple(tensor.shape), tensor.dtype) == (tuple(ref.shape), ref.dtype)


def view_tensor(ref: TensorRef | Tensor, memory: Bytes) -> Tensor:
    """A tensor of a snapshot, as a view of its memory, or of an export, which is the tensor itself."""
    if isinstance(ref, Tensor):
        return ref
    held = ref.extent.of(memory)
    if not held.nbytes:
        return torch.empty(ref.shape, dtype=ref.dtype)
    return torch.from_numpy(held).view(ref.dtype).view(ref.shape)


def is_of(value: object, module: str, name: str) -> bool:
    """Whether it is of a class whose module, slow to import, is only looked up."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _check_same(mine: dict[str, torch.nn.Parameter], theirs: Mapping[str, Any]) -> None:
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())
        raise InvalidInput(
            f"the workers' models have different parameters ({odd[0]!r} is in one alone): build the same model on each."
        )
    for name, ref in theirs.items():
        if not _are_alike(mine[name], ref):
            here, there = (f"{each.dtype} {list(each.shape)}" for each in (mine[name], ref))
            raise InvalidInput(
                f"parameter {name!r} is {here} here and {there} in the state that was saved: build the same model on "
                "each worker, and use another run_id for another model."
            )


# ---- what ranks hold alike


def find_difference(group: Group, model: Module, counts: bool = True) -> str | None:
    """A sentence on the first part, mode or buffer that differs between ranks, or None; the same on all. Collective.
    Statistics of normalization may differ. counts: False: this rank has no state that others should have."""
    own = dict(_describe_parts(model)) if counts else None
    described = json.dumps(own).encode()
    digests = group.allgather(np.array([zlib.crc32(described), counts], np.int64)).tolist()
    if len({digest for digest, counted in digests if counted}) < 2:
        return None
    found = [json.loads(each) for each in group.allgather_bytes(described)]
    holders = [rank for rank, parts in enumerate(found) if parts is not None]
    first = holders[0]
    for name in dict.fromkeys(name for rank in holders for name in found[rank]):
        odd = [rank for rank in holders if found[rank].get(name) != found[first].get(name)]
        if odd:
            here, there = (found[rank].get(name, ["", "missing"])[1] for rank in (first, odd[0]))
            if here == there:
                here, there = "one value", "another one"
            ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
            return f"{name} is {here} on rank {first} and {there} on {ranks}"
    return None


def _describe_parts(model: Module) -> Iterator[tuple[str, tuple[int, str]]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name!r}", (0, "trained" if parameter.requires_grad else "frozen")
    for name, part in model.named_modules():
        mode = f"in {'training' if part.training else 'evaluation'} mode"
        yield f"layer {name!r}" if name else "the model", (0, mode)
    for name, buffer in list_buffers(model).items():
        if buffer.tensor is not None and not isinstance(buffer.owner, _NormBase):
            bits = 0 if hasattr(buffer.tensor, "to_local") else zlib.crc32(view_bytes(buffer.tensor)[0].data)
            yield f"buffer {name!r}", (bits, f"{buffer.tensor.dtype} {list(buffer.tensor.shape)}")
