"""A net and its rows, what takes its steps, and what one process makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_collectives import Group
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.reduction import ExchangeOptions
from spark_elastic.gradients.step_summary import count_summary_bytes
from spark_elastic.protocol.types import MembershipVersion, Phase, Position
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.loss import ModelLoss
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.step import GradientScaling, TrainStep
from spark_elastic.training.trainer import StepCall
from tests.fit_configs import make_config

ROWS = 10
X = torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(ROWS) % 3
NEXT = Position(0, Phase.TRAIN, 1)


class Order(Ledger):
    """Which lines came in which order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_ahead(self, fence: tuple[int, int], position: Position, row_ids: Any) -> None:
        self.lines.append(f"contributes {row_ids.tolist()}")

    def record_applied(self, fence: tuple[int, int], position: Position, world: int) -> None:
        self.lines.append("applied")


class TrainedModel:
    """A state and what takes its steps."""

    mode: Any = None  # of the exchange, before it was closed

    def __init__(
        self,
        model: nn.Module,
        batch_size: int = 3,
        loss: Any = None,
        metrics: Metrics | None = None,
        labels: int = 1,
        one_bucket: bool = False,
        **settings: Any,
    ) -> None:
        """loss: one of (output, label), or as `TrainStep` takes it. labels: how often they are given.
        one_bucket: a step has one exchange: see `OneBucketMode`. settings: of the `FitConfig`."""
        self.labels = (Y,) * labels
        self.model = copy.deepcopy(model)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.state = TorchTrainingState(self.model, optimizer)
        self.exchange = GradientExchange(
            self.model.named_parameters(),
            ExchangeOptions() if one_bucket else ExchangeOptions(bucket_bytes=64),
            count_message_bytes=count_summary_bytes if one_bucket else None,
        )
        self.ledger = Order()
        is_whole = hasattr(loss, "begin")
        objective = loss if is_whole else ModelLoss(loss or nn.CrossEntropyLoss(), weighted=False)
        settings |= {"label_cols": ("y", "z")[:labels], "batch_size": batch_size, "gradient_clip_norm": 1.0}
        config = make_config(terminate_on_nan=True, **settings)
        parts: Any = self.ledger, metrics or Metrics({}, ["y"], logs=False), GradientScaling()
        self.taker = TrainStep(self.state, objective, self.exchange, config, *parts)

    def take(
        self,
        group: Group,
        rows: range,
        then: Callable[[Any], Position] = lambda decision: NEXT,
        weights: torch.Tensor | None = None,
    ) -> Any:
        """weights: of all rows."""
        part = slice(rows.start, rows.stop)
        own = None if weights is None else weights[part]
        labels = tuple(y[part] for y in self.labels)
        share = LocalBatch(ROWS, np.arange(rows.start, rows.stop), (X[part],), labels, own)
        return self.taker.run(share, StepCall(group, MembershipVersion(), then))


def divide_rows(group: Group) -> range:
    return range(ROWS * group.rank // group.size, ROWS * (group.rank + 1) // group.size)


def take_steps(
    group: Group,
    model: nn.Module,
    steps: int = 1,
    divide: Callable[[Group], range] = divide_rows,
    **settings: Any,
) -> tuple[TrainedModel, Any]:
    """With the newest decision. settings: of the `TrainedModel`."""
    trainee = TrainedModel(model, **settings)
    with closing(trainee.exchange):
        for _ in range(steps):
            decision = trainee.take(group, divide(group))
        trainee.mode = trainee.exchange.mode
    return trainee, decision


def train_plain(model: nn.Module, steps: int = 1, loss: Any = nn.functional.cross_entropy) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(X), Y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def have_equal_values(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)
