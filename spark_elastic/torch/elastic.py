"""Elastic training of hand-written loops under Horovod's names: `hvd.elastic.run`, states, sampler, loader, handlers.

```
@hvd.elastic.run
def train(state): ...
train(hvd.elastic.TorchState(model, optimizer, epoch=0))
```
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from spark_elastic.data import sampler
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.topology import rank, size
from spark_elastic.protocol.types import HostUpdateResult
from spark_elastic.state.elastic_loop import elastic
from spark_elastic.state.handlers import (
    REGISTRY,
    Registry,
    SamplerStateHandler,
    SnapshotHandler,
    StateDictHandler,
    StateHandler,
)
from spark_elastic.state.snapshot import Bytes, Extent, SnapshotBuilder
from spark_elastic.state.state import State
from spark_elastic.torch.data_loader import DataLoaderStateHandler, ElasticDataLoader
from spark_elastic.torch.optimizer import has_unapplied, is_distributed, mark_applied
from spark_elastic.worker.context import get_context, get_process_context
from spark_elastic.worker.notification import WorkerNotificationManager, notification_manager
from spark_elastic.worker.session import ObjectState, get_session

__all__ = [
    "ElasticDataLoader",
    "ElasticSampler",
    "HostUpdateResult",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "SnapshotHandler",
    "State",
    "StateHandler",
    "TorchState",
    "WorkerNotificationManager",
    "get_handler_registry",
    "notification_manager",
    "run",
    "set_handler_registry",
]

log = logging.getLogger(__name__)

R = TypeVar("R")

_GradScaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # the former since torch 2.3


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator: call `func(state, ...)` again in each world, from where its state stands, until it returns."""
    return elastic(func, get_session)


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return (type, handler class) pairs. A `TorchState` takes the first one that fits a value."""
    own = get_process_context().state_handlers
    return list(_registry() if own is None else own)


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """Set the pairs for states that this process makes from now on."""
    get_process_context().state_handlers = list(registry)


def _registry() -> Registry:
    return (
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticDataLoader, DataLoaderStateHandler),
        (_GradScaler, GradScalerStateHandler),
        *REGISTRY,
    )


class ElasticSampler(sampler.ElasticSampler, torch.utils.data.Sampler[int]):
    """Yields the indices of this worker's rows that the epoch has not processed yet, in any world.

    pad: see `spark_elastic.data.sampler.ElasticSampler`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, pad: bool = True) -> None:
        super().__init__(dataset, shuffle, seed, rank=rank, size=size, pad=pad)


class TorchState(ObjectState):
    """Models, optimizers, schedulers, samplers and plain values by name, all in one snapshot."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        self._hooked: set[int] = set()
        self._has_checked = False  # that a model of this state has what its optimizers train
        self._has_stepped = False  # a plain optimizer has, since the last commit
        self._lone_steps = 0  # commits of such steps while the ranks had exchanged nothing
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)
        self._watch_optimizers()

    @property
    def registry(self) -> Registry:  # type: ignore[override] # looked up when the state is made
        return get_handler_registry()

    def in_mid_step(self) -> bool:
        """Whether there are gradients that no optimizer step has applied.

        Where several optimizers take turns, the backward pass of one may leave gradients to another's parameters: so
        with plain optimizers a step is under way only if all of them have such gradients.
        """
        optimizers = self._watch_optimizers()
        plain = [optimizer for optimizer in optimizers if not is_distributed(optimizer)]
        found = any(has_unapplied(optimizer) for optimizer in optimizers if is_distributed(optimizer)) or (
            bool(plain) and all(has_unapplied(optimizer) for optimizer in plain)
        )
        if found:
            _warn_unapplied_gradients()
        return found

    def make_commit(self) -> None:
        if not self._has_checked:
            self._check_trained()
            self._has_checked = True
        super().make_commit()
        if self._has_stepped and _is_training_alone():
            self._lone_steps += 1
            if self._lone_steps == 2:
                _warn_separate_replicas()
        self._has_stepped = False

    def renew_commit(self) -> None:
        self._defer()
        super().renew_commit()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        values = [handler.value for handler in self._handlers.values()]
        return [value for value in values if isinstance(value, torch.optim.Optimizer)]

    def _watch_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, whose steps wait for copies in the background and mark the gradients that they apply."""
        optimizers = self._optimizers()
        for optimizer in optimizers:
            if id(optimizer) not in self._hooked:
                inner = _find_hooked(optimizer)
                inner.register_step_pre_hook(lambda *step: self._snapshots.wait())
                if not is_distributed(optimizer):
                    mark_applied(optimizer)
                    inner.register_step_post_hook(self._on_step)
                self._hooked.add(id(optimizer))
        return optimizers

    def _on_step(self, optimizer: torch.optim.Optimizer, *step: object) -> None:
        mark_applied(optimizer)
        self._has_stepped = True

    def _check_trained(self) -> None:
        """
        Raises:
            InvalidInput: an optimizer trains a parameter that no snapshot of this state would contain.
        """
        handlers = self._handlers.values()
        if any(_may_hold_parameters(handler) for handler in handlers):
            return
        models = [handler.value for handler in handlers if isinstance(handler, ModelStateHandler)]
        contained = {id(parameter) for model in models for parameter in model.parameters()}
        for optimizer in self._optimizers():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) not in contained:
                    raise InvalidInput(
                        f"{type(optimizer).__name__} trains a parameter of shape {list(parameter.shape)} that belongs "
                        "to no model of this state, so each worker would train it alone: give the state each module "
                        "that the optimizer trains, as TorchState(model, optimizer, head=head)."
                    )

    def _defer(self) -> None:
        """Let the parameters that an optimizer of this state trains be copied in the background: only its `step`, which
        waits for the copy, changes them (R20, copies)."""
        optimizers = self._watch_optimizers()
        trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for handler in self._handlers.values():
            if isinstance(handler, ModelStateHandler):
                handler.trained = trained


def _may_hold_parameters(handler: StateHandler) -> bool:
    """Whether it handles something, apart from modules, that may contain parameters of a model."""
    if type(handler) is StateDictHandler:
        return not isinstance(handler.value, torch.optim.lr_scheduler.LRScheduler)
    return type(handler) not in (handler_class for _, handler_class in _registry())


def _find_hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself; that within a wrapper without hooks of its own, such as Accelerate's."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return _find_hooked(inner)
    raise InvalidInput(
        f"{type(optimizer).__name__} has neither step hooks nor an optimizer with them as `optimizer` or `optim`: call "
        "Optimizer.__init__ in its __init__."
    )


def _is_training_alone() -> bool:
    """Whether this is rank 0 of several that exchange nothing that this package or torch.distributed carries."""
    worker = get_context()
    if worker is None or worker.group is None or worker.group.rank or worker.group.size == 1:
        return False
    dist = torch.distributed
    return not worker.group_context.is_used and not (dist.is_available() and dist.is_initialized())


@lru_cache(maxsize=1)
def _warn_separate_replicas() -> None:
    """Warn once per process."""
    log.warning(
        "the ranks exchange no gradients, so each trains a model of its own: wrap the optimizer by "
        "hvd.DistributedOptimizer, or the model by DistributedDataParallel."
    )


@lru_cache(maxsize=1)
def _warn_unapplied_gradients() -> None:
    """Warn once per process."""
    log.warning(
        "commit() between backward() and the optimizer's step() saves nothing, since the gradients are part of no "
        "snapshot: the commit after the step holds their rows."
    )


class _TensorRef(NamedTuple):
    """A tensor in a snapshot's memory."""

    extent: Extent  # its bytes in the memory of the snapshot
    dtype: torch.dtype  # with which these bytes are viewed
    shape: tuple[int, ...]  # () for a scalar
    on_host: bool  # False: it was on the device that the process trains on

    @classmethod
    def of(cls, tensor: torch.Tensor, extent: Extent) -> _TensorRef:
        return cls(extent, tensor.dtype, tuple(tensor.shape), tensor.device.type == "cpu")


class _Views:
    """Views of tensors as bytes, cached while a tensor stays in its memory: to make one costs microseconds."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, int, Bytes, Callable[[], int]]] = {}
        self._former = self._known

    def begin(self) -> None:
        """A capture begins; only tensors of this and of the former one stay known."""
        self._former, self._known = self._known, {}

    def put(self, builder: SnapshotBuilder, tensor: torch.Tensor, *, deferred: bool) -> Extent:
        known = self._former.get(id(tensor)) or self._known.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != tensor.data_ptr():
            memory, shared = _view_bytes(tensor)
            if not shared:
                return builder.add(memory)
            known = tensor, tensor.data_ptr(), memory, lambda: tensor._version
        self._known[id(tensor)] = known
        return builder.add(known[2], known[3] if deferred else None)


class ModelStateHandler(SnapshotHandler):
    """Parameters, buffers and extra state of a module."""

    def __init__(self, value: torch.nn.Module) -> None:
        super().__init__(value)
        self.trained: set[int] = set()  # ids of the parameters that may be copied in the background
        self._views = _Views()
        self._begin_with_model()

    def set_value(self, value: torch.nn.Module) -> None:
        super().set_value(value)
        self._begin_with_model()

    def _begin_with_model(self) -> None:
        self._extra = self._with_extra()
        self._first_buffers = frozenset(self._list_buffers())  # those registered later are the training's
        self._check_whole()

    def parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """The parameters that each rank has whole, by name."""
        model: torch.nn.Module = self.value
        return model.named_parameters()

    def capture(self, builder: SnapshotBuilder) -> Any:
        put, trained = self._views.put, self.trained
        self._views.begin()
        return {
            "parameters": {
                n: _TensorRef.of(p, put(builder, p, deferred=id(p) in trained)) for n, p in self.parameters()
            },
            "buffers": {
                n: None if b is None else _TensorRef.of(b, put(builder, b, deferred=False))
                for n, (_, _, b) in self._list_buffers().items()
            },
            "extra": {name: copy.deepcopy(module.get_extra_state()) for name, module in self._extra},
        }

    def load(self, values: Any, memory: Bytes) -> None:
        parameters = dict(self.parameters())
        _check_same(parameters, values["parameters"])
        with torch.no_grad():
            for name, ref in values["parameters"].items():
                parameters[name].copy_(_view_tensor(ref, memory))
            self._load_buffers(values["buffers"], memory)
        for name, module in self._extra:
            module.set_extra_state(copy.deepcopy(values["extra"][name]))

    def _load_buffers(self, saved: dict[str, _TensorRef | None], memory: Bytes) -> None:
        device = _find_device((*self.value.parameters(), *self.value.buffers()))
        live = self._list_buffers()
        for name in live.keys() - saved.keys() - self._first_buffers:  # registered since the commit
            module, own, _ = live[name]
            delattr(module, own)  # as on a newcomer
        for name, ref in saved.items():
            _, _, buffer = live.get(name, (None, "", None))
            if ref is None or buffer is None or buffer.shape != ref.shape or 0 in buffer.stride():  # expanded
                path, _, own = name.rpartition(".")
                value = None if ref is None else _load_value(ref, None, memory, device)
                self.value.get_submodule(path)._buffers[own] = value
            else:
                buffer.copy_(_view_tensor(ref, memory))

    def _list_buffers(self) -> dict[str, tuple[torch.nn.Module, str, torch.Tensor | None]]:
        """(owner, own name, tensor or None if it is not set) by name."""
        return {
            f"{path}.{own}" if path else own: (module, own, buffer)
            for path, module in self.value.named_modules()
            for own, buffer in module._buffers.items()
        }

    def _check_whole(self) -> None:
        # Parameters do not tell: use_orig_params=True shows them as they were.
        if any(_is_of(m, "torch.distributed.fsdp", "FullyShardedDataParallel") for m in self.value.modules()):
            raise InvalidInput(
                "FullyShardedDataParallel leaves a part of the model on each worker, and TorchState holds whole "
                "models: divide it by fully_shard and use FSDPState."
            )

    def _with_extra(self) -> list[tuple[str, torch.nn.Module]]:
        plain = torch.nn.Module.get_extra_state
        return [(n, m) for n, m in self.value.named_modules() if type(m).get_extra_state is not plain]


class OptimizerStateHandler(SnapshotHandler):
    """Settings and state of an optimizer; what `state_dict` returns, if its class has one of its own."""

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(value)
        self._views = _Views()

    @property
    def has_own_format(self) -> bool:
        """Whether the optimizer's class has a `state_dict` or `load_state_dict` of its own."""
        kind = type(self.value)
        return any(
            not method.__module__.startswith(("torch.optim.", "accelerate."))
            for method in (kind.state_dict, kind.load_state_dict)
        )

    def capture(self, builder: SnapshotBuilder) -> Any:
        if _is_of(self.value, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            raise InvalidInput(
                "a ZeroRedundancyOptimizer keeps on each worker another part of its state, which a loss would take "
                "along: use the optimizer that it wraps, or divide the model by fully_shard and use FSDPState."
            )
        self._views.begin()
        if self.has_own_format:
            return self._add_tensors(self.value.state_dict(), builder, deferred=False)
        groups = self.value.param_groups
        settings = [
            {k: self._add_tensors(v, builder, deferred=False) for k, v in g.items() if k != "params"}
            for g in groups
        ]
        state = self.value.state
        others = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        return (
            settings,
            [self._add_tensors(state.get(p), builder, deferred=True) for g in groups for p in g["params"]],
            self._add_tensors(others, builder, deferred=False),
        )

    def load(self, values: Any, memory: Bytes) -> None:
        groups, state = self.value.param_groups, self.value.state
        device = _find_device(p for group in groups for p in group["params"])
        if self.has_own_format:
            self.value.load_state_dict(_load_value(values, None, memory, device))
            inner = _find_hooked(self.value)
            if self.value.param_groups is not inner.param_groups:
                self.value.param_groups = inner.param_groups  # `load_state_dict` has made new ones
            return
        settings, states, others = values
        while len(groups) > len(settings):  # those that were added after the snapshot
            for parameter in groups.pop()["params"]:
                state.pop(parameter, None)
        parameters = [p for group in groups for p in group["params"]]
        if (len(groups), len(parameters)) != (len(settings), len(states)):
            raise InvalidInput(
                f"the workers' optimizers differ ({len(parameters)} parameters in {len(groups)} groups here, "
                f"{len(states)} in {len(settings)} there): add all groups before the state is made, as a newcomer does "
                "not take the steps that added one, and set requires_grad=False until its parameters are trained."
            )
        for group, saved in zip(groups, settings, strict=True):
            for key, value in saved.items():
                group[key] = _load_value(value, group.get(key), memory, device)
        for parameter, saved in zip(parameters, states, strict=True):
            if saved is None:
                state.pop(parameter, None)
            else:
                state[parameter] = _load_value(saved, state.get(parameter), memory, parameter.device)
        for key in [key for key in state if not isinstance(key, torch.Tensor) and key not in others]:
            del state[key]
        for key, saved in others.items():
            state[key] = _load_value(saved, state.get(key), memory, device)

    def reset(self) -> None:
        """Drop the gradients of the former world."""
        self.value.zero_grad()

    def _add_tensors(self, value: Any, builder: SnapshotBuilder, *, deferred: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return _TensorRef.of(value, self._views.put(builder, value, deferred=deferred))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, dict):
            return {key: self._add_tensors(item, builder, deferred=deferred) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._add_tensors(item, builder, deferred=deferred) for item in value)
        return copy.deepcopy(value)


class GradScalerStateHandler(StateDictHandler):
    """A `GradScaler`, which a world may leave between `unscale_` and `update`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        value.step = partial(_take_scaled_step, value)

    def set_value(self, value: Any) -> None:
        super().set_value(value)
        value.step = partial(_take_scaled_step, value)

    def load(self, values: Any, memory: Bytes) -> None:
        super().load(values, memory)
        forget_gradients(self.value)


def forget_gradients(scaler: Any) -> None:
    """Drop what a `GradScaler` has found in gradients that are void now."""
    if scaler.is_enabled():  # a disabled one keeps nothing, not even the attribute
        scaler._per_optimizer_states.clear()


def _take_scaled_step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
    """The scaler's own `step`. One that it has skipped, since gradients are infinite, is over as well."""
    result = type(scaler).step(scaler, optimizer, *args, **options)
    if not is_distributed(optimizer):
        mark_applied(optimizer)
    return result


def _find_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where they are that are not on the host."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


def _load_value(saved: Any, live: Any, memory: Bytes, device: torch.device) -> Any:
    """Return the value that was saved, in the live tensor if shape and dtype fit.

    Args:
        device: for tensors that were not on the host.
    """
    if isinstance(saved, _TensorRef):
        arrived = _view_tensor(saved, memory)
        if isinstance(live, torch.Tensor) and live.shape == arrived.shape and live.dtype == arrived.dtype:
            with torch.no_grad():
                return live.copy_(arrived)
        return arrived.clone() if saved.on_host else arrived.to(device)
    if isinstance(saved, dict):
        known = live if isinstance(live, dict) else {}
        return {key: _load_value(item, known.get(key), memory, device) for key, item in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_load_value(item, None, memory, device) for item in saved)
    return copy.deepcopy(saved)


def _view_tensor(ref: _TensorRef, memory: Bytes) -> torch.Tensor:
    """Return a view of the snapshot's memory."""
    offset, nbytes = ref.extent
    if not nbytes:
        return torch.empty(ref.shape, dtype=ref.dtype)
    return torch.from_numpy(memory[offset : offset + nbytes]).view(ref.dtype).view(ref.shape)


def _is_of(value: object, module: str, name: str) -> bool:
    """Whether it is of a class whose module, slow to import, is only looked up."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _view_bytes(tensor: torch.Tensor) -> tuple[Bytes, bool]:
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


def _check_same(mine: dict[str, torch.nn.Parameter], theirs: dict[str, _TensorRef]) -> None:
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())
        raise InvalidInput(
            f"the workers' models have different parameters ({odd[0]!r} is in one alone): build the same model on each."
        )
    for name, ref in theirs.items():
        here, there = (mine[name].dtype, tuple(mine[name].shape)), (ref.dtype, ref.shape)
        if here != there:
            raise InvalidInput(
                f"parameter {name!r} is {_describe(*here)} here and {_describe(*there)} in the state that was saved: "
                "build the same model on each worker, and use another run_id for another model."
            )


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
