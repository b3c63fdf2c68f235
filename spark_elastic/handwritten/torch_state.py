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
from typing import Any, NoReturn, SupportsIndex

import torch

from spark_elastic.data import horovod_data
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.module_state import (
    FrozenCopies,
    ModelStateHandler,
    OptimizerStateHandler,
    find_difference,
    find_hooked,
)
from spark_elastic.gradients.process_sets import rank, size
from spark_elastic.handwritten.data_loader import DataLoaderStateHandler, ElasticDataLoader
from spark_elastic.handwritten.elastic_loop import run
from spark_elastic.handwritten.object_state import ObjectState, State
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
from spark_elastic.worker.context import get_context, get_process_context
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager

__all__ = ["HostUpdateResult", "WorkerNotificationManager", "notification_manager", "run"]
__all__ += ["ElasticDataLoader", "ElasticSampler", "ObjectState", "State", "TorchState"]
__all__ += ["ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler"]
__all__ += ["SnapshotHandler", "StateHandler", "get_handler_registry", "set_handler_registry"]

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
        named = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in named.items() if value is not None}, **values)
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
        ours = [optimizer for optimizer in optimizers if is_distributed(optimizer)]
        is_under_way = any(map(has_unapplied, ours)) or (bool(plain) and all(map(has_unapplied, plain)))
        if is_under_way:
            _warn_once(
                "commit() between backward() and the optimizer's step() saves nothing, since the gradients are part of "
                "no snapshot: the commit after the step holds their rows."
            )
        return is_under_way

    def make_commit(self) -> None:
        if not self._has_checked:
            self._check_trained()
            self._has_checked = True
        super().make_commit()
        if self._has_stepped and _is_training_alone():
            self._lone_steps += 1
            if self._lone_steps == 2:
                _warn_once(
                    "the ranks exchange no gradients, so each trains a model of its own: wrap the optimizer by "
                    "hvd.DistributedOptimizer, or the model by DistributedDataParallel."
                )
        self._has_stepped = False

    def begin_world(self, source: int | None, commits: int | None) -> None:
        self._warn_differing(self._number if commits is None else commits)
        super().begin_world(source, commits)

    def _warn_differing(self, commits: int) -> None:
        """Warn once of an object that the ranks with the newest commit do not have alike: each has trained with its
        own, and continues with that of one of them. Collective."""
        group = self._find_group()
        if group is None or group.size == 1:
            return
        for handler in self._find_handlers(ModelStateHandler).values():
            difference = find_difference(group, handler.value, counts=0 < self._number == commits)
            if difference is not None and group.rank == 0:
                _warn_once(
                    f"{difference}: all workers continue with the value of one of them; exchange it in the loop, or "
                    "give each the same."
                )

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
        """Refuse an optimizer that trains a parameter that no snapshot of this state would contain."""
        if any(_may_hold_parameters(handler) for handler in self._handlers.values()):
            return
        models = self._find_handlers(ModelStateHandler).values()
        contained = {id(parameter) for handler in models for parameter in handler.value.parameters()}
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
        for model in self._find_handlers(ModelStateHandler).values():
            model.trained, model.frozen = trained, model.frozen or FrozenCopies()
        for optimizer_handler in self._find_handlers(OptimizerStateHandler).values():
            optimizer_handler.list_parameters = self._list_parameters

    def list_kept(self) -> dict[tuple[str, int, int], Kept]:
        models = self._find_handlers(ModelStateHandler).values()
        copies = [handler.frozen.list_copies() for handler in models if handler.frozen]
        return {key: kept for each in copies for key, kept in each.items()}

    def _list_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for key, handler in self._find_handlers(ModelStateHandler).items():
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
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


# ---- which gradients an optimizer has applied: what a state asks before it commits


class DistributedBase(torch.optim.Optimizer):
    """Refuses what no distributed optimizer can do. First base of the two classes of ours."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise InvalidInput("DistributedOptimizer takes no further parameters: add the group before wrapping.")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidInput(
            "a DistributedOptimizer cannot be copied or pickled, since its exchange belongs to this process: take its "
            "state_dict(), and wrap the other optimizer itself."
        )

    def has_unapplied_gradients(self) -> bool | None:
        """Whether there are gradients that its newest step has not applied; None: it does not know."""
        return None


def is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it knows which gradients its steps have applied."""
    return isinstance(optimizer, DistributedBase) and optimizer.has_unapplied_gradients() is not None


def mark_applied(optimizer: torch.optim.Optimizer) -> None:
    """Note that a step of a plain optimizer has applied the gradients that are there, as they are now, or that a
    `GradScaler` has skipped it."""
    for gradient in _list_gradients(optimizer):
        gradient._applied_version = gradient._version  # type: ignore[attr-defined]


def has_unapplied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has gradients that its newest step has not applied; a plain one if `mark_applied` was called
    after each step."""
    knows = optimizer.has_unapplied_gradients() if isinstance(optimizer, DistributedBase) else None
    if knows is not None:
        return knows
    return any(
        getattr(gradient, "_applied_version", None) != gradient._version and _has_values(gradient)
        for gradient in _list_gradients(optimizer)  # `zero_grad` may leave zeros
    )


def _list_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _has_values(gradient: torch.Tensor) -> bool:
    own: Any = gradient
    if hasattr(own, "to_local"):  # of a DTensor, whose own `any` would be a collective
        own = own.to_local()
    return bool((own._values() if own.is_sparse else own).any())


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
