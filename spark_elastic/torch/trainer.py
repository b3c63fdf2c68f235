"""What `self.trainer` is to a LightningModule, by Lightning's names: it runs nothing, it knows where training is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """What is known before the first step, which is when `configure_optimizers` asks.

    num_training_batches: steps of an epoch. global_step: optimizer steps taken since the training began, whatever
    worlds took them. Ranks are 0 until there is a world, as Lightning's are without a Trainer.
    """

    max_epochs: int
    num_training_batches: int
    current_epoch: int = 0
    global_step: int = 0
    global_rank: int = 0
    local_rank: int = 0
    logger: None = None
    loggers: tuple[()] = ()

    @property
    def estimated_stepping_batches(self) -> int:
        """Steps of the whole training."""
        return self.max_epochs * self.num_training_batches

    def __getattr__(self, name: str) -> Any:
        there = sorted(known for known in {*vars(self), *dir(type(self))} if known[0] != "_")
        raise AttributeError(
            f"self.trainer has no {name} here: no Trainer runs this LightningModule; there are {', '.join(there)}."
        )


@dataclass(frozen=True, kw_only=True)
class TrainerStandIn(TrainerPlan):
    """What a step may ask as well: which world takes it, and whether it trains."""

    world_size: int
    training: bool
    sanity_checking: bool = False

    @property
    def validating(self) -> bool:
        return not self.training

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0


# Of a trial on the driver, where nobody has counted the rows yet.
TRIAL = TrainerPlan(max_epochs=10, num_training_batches=1000)


@contextmanager
def told(model: torch.nn.Module, trainer: TrainerPlan, **others: Any) -> Iterator[None]:
    """Instance attributes for a while: the module's own `trainer` and `log` would ask for a Trainer that runs it."""
    given: Any = {"_trainer": trainer, **others}
    own: Any = vars(model)
    before = {name: own[name] for name in given if name in own}
    own.update(given)
    try:
        yield
    finally:
        for name in given:
            del own[name]
        own.update(before)
