"""Steps of bitwise mode over threads: gradients, losses, metrics and buffers have the same bits in any world."""

from __future__ import annotations

import copy
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import Division
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.exchange_options import ExchangeOptions
from spark_elastic.protocol.types import MembershipVersion, Phase, Position
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.torch.loss import MultiOutputLoss
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.torch.share_step import ShareStep, build_shares
from spark_elastic.training.torch.spec import BatchBuilder
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.step import GradientScaling
from spark_elastic.training.trainer import StepCall
from tests.fit_configs import change, make_config
from tests.unit.torch.worlds import run_in_world

ROWS, SHARES, STEPS = 23, 5, 3
RNG = np.random.default_rng(1)
COLUMNS = {
    "x": RNG.normal(size=(ROWS, 4)).astype(np.float32),
    "a": RNG.normal(size=ROWS).astype(np.float32),
    "b": RNG.integers(0, 3, ROWS),
    "w": RNG.uniform(0.5, 2.0, ROWS).astype(np.float32),
}
CONFIG = make_config(
    label_cols=("a", "b"),
    sample_weight_col="w",
    num_workers=2,
    batch_size=3,  # shares of 4 and 5 rows take two passes
    gradient_clip_norm=0.1,
    determinism="bitwise",
    virtual_shares=SHARES,
)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        body = self.body(x)
        return self.a(body)[:, 0], self.b(body)


torch.manual_seed(2)
NET = TwoHeads()


def mean_output(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return output.double().mean()


def center(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A number for each row, which depends on the others."""
    return (output - output.mean() - label).square() / (0.1 + output.var())


def take_steps(group: Group, scope: str | None) -> dict[str, Any]:
    model = copy.deepcopy(NET)
    state = TorchTrainingState(model, torch.optim.Adam(model.parameters(), lr=0.01))
    metrics = Metrics({"mean": mean_output}, CONFIG.data.label_cols, logs=True)
    first = nn.MSELoss() if scope is None else center
    loss = MultiOutputLoss({"a": (first, 0.3), "b": (nn.CrossEntropyLoss(), 0.7)}, weighted=True)
    config = change(CONFIG, loss_scope=scope)
    builder = BatchBuilder(
        (Column("x", "float32", (4,)),), CONFIG.data.label_cols, "w", torch.float32, reshapes=False
    )
    losses = []
    with closing(GradientExchange(model.named_parameters(), ExchangeOptions(shares=SHARES))) as exchange:
        step = ShareStep(state, loss, exchange, config, Ledger(), metrics, GradientScaling())
        for number in range(STEPS):
            # In the second step the last rank has all shares that it may have.
            unequal = Division((*range(group.size), SHARES))
            division = unequal if number == 1 else Division.equal(group.size, SHARES)
            own = slice(*division.compute_rank_bounds(ROWS, group.rank))
            columns = {name: each[own] for name, each in COLUMNS.items()}
            rows = StepRows(0, 0, ROWS, np.arange(ROWS)[own], columns, division)
            batch = build_shares(builder, rows, group.rank)
            after = Position(0, Phase.TRAIN, number + 1)
            decision = step.run(
                batch, StepCall(group, MembershipVersion(), lambda decision, after=after: after)
            )
            losses.append((decision.loss, decision.denominator, decision.rows))
    weights = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    return {"weights": weights, "losses": losses, "metrics": metrics.results()}


@pytest.mark.native
@pytest.mark.parametrize("scope", [None, "step"])
def test_steps_have_the_same_bits_in_any_world_and_any_division(scope: str | None) -> None:
    take = partial(take_steps, scope=scope)
    (alone,) = run_in_world(1, take)
    tracked = torch.from_numpy(np.frombuffer(alone["weights"]["body.1.num_batches_tracked"], np.int64).copy())
    assert int(tracked) == 2 * STEPS, "a share has two passes, and a step counts the shares once"
    assert set(alone["metrics"]) == {"loss_a", "loss_b", "mean_a", "mean_b"}
    assert {rows for *_, rows in alone["losses"]} == {ROWS}
    for size in range(2, SHARES + 1):
        for found in run_in_world(size, take):
            assert found == alone
