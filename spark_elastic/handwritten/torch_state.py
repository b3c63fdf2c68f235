"""Elastic training of hand-written loops under Horovod's names: `hvd.elastic.run`, states, sampler, loader, handlers.

```
@hvd.elastic.run
def train(state): ...
train(hvd.elastic.TorchState(model, optimizer, epoch=0))
```
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Sized
from functools import lru_cache, partial
from typing import Any

import torch

from spark_elastic.data import horovod_data
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import rank, size
from spark_elastic.handwritten.applied_gradients import has_unapplied, is_distributed, mark_applied
from spark_elastic.handwritten.data_loader import DataLoaderStateHandler, ElasticDataLoader
from spark_elastic.handwritten.object_state import ObjectState, State
from spark_elastic.handwritten.session import run
from spark_elastic.protocol.types import HostUpdateResult
from spark_elastic.runs.handlers import (
    REGISTRY,
    Registry,
    SamplerStateHandler,
    SnapshotHandler,
    StateDictHandler,
    StateHandler,
)
from spark_elastic.runs.snapshot import Bytes, Kept
from spark_elastic.training.torch.module_state import (
    FrozenCopies,
    ModelStateHandler,
    OptimizerStateHandler,
    find_difference,
    find_hooked,
)
from spark_elastic.worker.context import get_context, get_process_context
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager

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

_GradScaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # the former since torch 2.3


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


class ElasticSampler(horovod_data.ElasticSampler, torch.utils.data.Sampler[int]):
    """Yields the indices of this worker's rows that the epoch has not processed yet, in any world.

    pad: see `spark_elastic.data.horovod_data.ElasticSampler`.
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

    def begin_world(self, source: int | None, commits: int | None) -> None:
        self._warn_differing(self._number if commits is None else commits)
        super().begin_world(source, commits)

    def _warn_differing(self, commits: int) -> None:
        """Warn once of an object that the ranks with the newest commit do not have alike: each has trained with its
        own, and continues with that of one of them. Collective."""
        group = self._find_group()
        models = [h.value for h in self._handlers.values() if isinstance(h, ModelStateHandler)]
        if group is None or group.size == 1:
            return
        for model in models:
            difference = find_difference(group, model, counts=0 < self._number == commits)
            if difference is not None and group.rank == 0:
                _warn_difference(difference)

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
                inner = find_hooked(optimizer)
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
                handler.frozen = handler.frozen or FrozenCopies()
            elif isinstance(handler, OptimizerStateHandler):
                handler.list_parameters = self._list_parameters

    def list_kept(self) -> dict[tuple[str, int, int], Kept]:
        models = [handler for handler in self._handlers.values() if isinstance(handler, ModelStateHandler)]
        return {
            key: kept for each in models if each.frozen for key, kept in each.frozen.list_copies().items()
        }

    def _list_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for key, handler in self._handlers.items():
            if isinstance(handler, ModelStateHandler):
                for name, parameter in handler.value.named_parameters():
                    yield f"{key}.{name}", parameter


def _may_hold_parameters(handler: StateHandler) -> bool:
    """Whether it handles something, apart from modules, that may contain parameters of a model."""
    if type(handler) is StateDictHandler:
        return not isinstance(handler.value, torch.optim.lr_scheduler.LRScheduler)
    return type(handler) not in (handler_class for _, handler_class in _registry())


def _is_training_alone() -> bool:
    """Whether this is rank 0 of several that exchange nothing that this package or torch.distributed carries."""
    worker = get_context()
    if worker is None or worker.group is None or worker.group.rank or worker.group.size == 1:
        return False
    dist = torch.distributed
    return not worker.group_context.is_used and not (dist.is_available() and dist.is_initialized())


@lru_cache(maxsize=8)
def _warn_difference(difference: str) -> None:
    """Warn once per process."""
    log.warning(
        "%s: all workers continue with the value of one of them; exchange it in the loop, or give each the same.",
        difference,
    )


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
