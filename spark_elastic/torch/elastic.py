"""Elastic training of hand-written loops under Horovod's names: `hvd.elastic.run`, states, sampler, handlers.

```
@hvd.elastic.run
def train(state): ...
train(hvd.elastic.TorchState(model, optimizer, epoch=0))
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Any, TypeVar

import torch

from spark_elastic.data import sampler
from spark_elastic.ops.topology import rank, size
from spark_elastic.state.elastic_loop import elastic
from spark_elastic.state.handlers import (
    REGISTRY,
    Registry,
    SamplerStateHandler,
    SnapshotHandler,
    StateHandler,
)
from spark_elastic.state.state import State
from spark_elastic.torch.handlers import ModelStateHandler, OptimizerStateHandler
from spark_elastic.torch.optimizer import has_unapplied
from spark_elastic.worker.context import register_handlers, registered_handlers
from spark_elastic.worker.seat import ObjectState, seat_of_process

__all__ = [
    "ElasticSampler",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "SnapshotHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]

log = logging.getLogger(__name__)

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """`func(state, ...)` run again in each world from where its state stands, until it returns. A decorator."""
    return elastic(func, seat_of_process)


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """(type, handler class) pairs, of which a `TorchState` takes the first that fits a value."""
    own = registered_handlers()
    return list(_registry() if own is None else own)


def set_handler_registry(registry: Sequence[tuple[type, type[StateHandler]]]) -> None:
    """For the states that this process makes from here on."""
    register_handlers(list(registry))


def _registry() -> Registry:
    return ((torch.nn.Module, ModelStateHandler), (torch.optim.Optimizer, OptimizerStateHandler), *REGISTRY)


class ElasticSampler(sampler.ElasticSampler, torch.utils.data.Sampler[int]):
    """Indices of this worker's rows that are still to be processed in the epoch, in whatever world it is.

    pad: see `spark_elastic.data.sampler.ElasticSampler`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, pad: bool = True) -> None:
        super().__init__(dataset, shuffle, seed, rank=rank, size=size, pad=pad)


class TorchState(ObjectState):
    """Models, optimizers, schedulers, samplers and plain values by name, all parts of one snapshot."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        self._hooked: set[int] = set()
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)

    @property
    def registry(self) -> Registry:  # type: ignore[override] # looked up when the state is made
        return get_handler_registry()

    def in_mid_step(self) -> bool:
        """Gradients wait for their optimizer's step."""
        found = any(has_unapplied(optimizer) for optimizer in self._optimizers())
        if found:
            _tell_of_gradients()
        return found

    def save_again(self) -> None:
        self._defer()
        super().save_again()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        values = [handler.value for handler in self._handlers.values()]
        return [value for value in values if isinstance(value, torch.optim.Optimizer)]

    def _defer(self) -> None:
        """What may be copied in the background: what only an optimizer of this state changes."""
        optimizers = self._optimizers()
        for optimizer in optimizers:
            if id(optimizer) not in self._hooked:
                optimizer.register_step_pre_hook(lambda *step: self._commits.wait())
                self._hooked.add(id(optimizer))
        trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for handler in self._handlers.values():
            if isinstance(handler, ModelStateHandler):
                handler.trained = trained


@lru_cache(maxsize=1)
def _tell_of_gradients() -> None:
    """Once in a process."""
    log.warning(
        "commit() between backward() and the optimizer's step() saves nothing, since the gradients are part of no "
        "snapshot: the commit after the step holds their rows."
    )
