"""Bitwise mode: steps have the same bits in any world; who checks which shares, and what the ranks conclude of it."""

from __future__ import annotations

import copy
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import DataPlan, Division
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.reduction import ExchangeOptions
from spark_elastic.protocol.types import MembershipVersion, Phase, Position
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.torch.loss import MultiOutputLoss
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.torch.share_step import (
    GradientDigest,
    ShareCheck,
    ShareChecker,
    ShareStep,
    build_shares,
)
from spark_elastic.training.torch.spec import BatchBuilder
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.step import GradientScaling
from spark_elastic.training.trainer import StepCall, StepDisputed
from tests.fit_configs import change, make_config
from tests.worlds import run_in_world

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
    features = (Column("x", "float32", (4,)),)
    builder = BatchBuilder(features, CONFIG.data.label_cols, "w", torch.float32, reshapes=False)
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
            call = StepCall(group, MembershipVersion(), lambda decision, after=after: after)
            decision = step.run(batch, call)
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


ALL_SHARES = 8
PLAN = DataPlan((400,), 32, 3, 1, shares=ALL_SHARES)
SPEC: Any = SimpleNamespace(plan=PLAN, rows=None, open_reader=lambda rows: (None, None))


def checker(every: int = 1) -> ShareChecker:
    return ShareChecker(SPEC, every, None, lambda rows, rank: None)  # type: ignore[arg-type, return-value]


def at(step: int, epoch: int = 0) -> Position:
    return Position(epoch, Phase.TRAIN, step)


def digest_of(*numbers: float) -> GradientDigest:
    made = GradientDigest()
    made.add(0, torch.tensor(numbers))
    made.add(1, None)
    return made


def judge(check: ShareCheck, *found: GradientDigest | None) -> None:
    blobs = [b"" if each is None else each.digest() for each in found]
    answers = iter((blobs, [b"h"] * len(found)))  # their digests, then their hosts
    group: Any = SimpleNamespace(size=len(found), allgather_bytes=lambda own: next(answers))
    checker().judge(check, group, None)


def test_each_share_and_each_rank_is_checked_by_and_by() -> None:
    division = Division((0, 1, 3, 8))
    found = [checker().draw(at(step, epoch), division) for epoch in range(20) for step in range(PLAN.steps)]
    checks = [check for check in found if check is not None]
    assert {check.share for check in checks} == set(range(ALL_SHARES))
    for check in checks:
        first, past = division.get_rank_parts(check.owner)
        assert first <= check.share < past
        assert sorted((check.owner, *check.witnesses)) == [0, 1, 2]
    five = Division.equal(5, ALL_SHARES)
    drawn = [checker().draw(at(step), five) for step in range(PLAN.steps)]
    witnesses = {rank for check in drawn if check is not None for rank in check.witnesses}
    assert witnesses == set(range(5))


def test_only_every_so_many_steps_and_only_with_others_is_there_a_check() -> None:
    division = Division.equal(2, ALL_SHARES)
    checked = [step for step in range(PLAN.steps) if checker(4).draw(at(step), division) is not None]
    assert checked == list(range(0, PLAN.steps, 4))
    assert checker().draw(at(0), Division.equal(1, ALL_SHARES)) is None


ONE, OTHER = digest_of(1.0), digest_of(1.0000001)


@pytest.mark.parametrize(
    ("check", "found", "says", "suspects"),
    [
        (ShareCheck(1, 0, (2,)), [ONE, None, ONE], None, ()),
        (ShareCheck(1, 0, (2, 1)), [ONE, ONE, OTHER], r"share 1: rank 2 on host h.* than the 2 others", (2,)),
        (ShareCheck(1, 1, (0,)), [ONE, OTHER], "which .* cannot be said: with three workers", (1, 0)),
    ],
)
def test_a_third_decides_who_is_wrong(check: Any, found: list[Any], says: str | None, suspects: Any) -> None:
    if says is None:
        judge(check, *found)
        return
    with pytest.raises(StepDisputed, match=says) as caught:
        judge(check, *found)
    assert caught.value.suspects == suspects


def test_every_bit_counts() -> None:
    assert digest_of(0.0).digest() != digest_of(-0.0).digest()
    assert digest_of(1.0).digest() == digest_of(1.0).digest()
    other = digest_of(1.0)
    other.loss = (1.0, 2.0)
    assert other.digest() != digest_of(1.0).digest()
    sparse, half = GradientDigest(), GradientDigest()
    sparse.add(0, torch.tensor([1.0]).to_sparse())
    half.add(0, torch.tensor(1.0, dtype=torch.bfloat16))
    assert sparse.digest() != half.digest()
