"""`SyncBatchNorm` as torch's own layer over the whole batch in one process; dropout drawn by rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spark_elastic.torch as hvd
from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.torch import RowDropout, SyncBatchNorm, draw_rows
from spark_elastic.training.torch.buffers import describe_world_dependence
from tests.unit.training.torch.trainees import ROWS, have_equal_values, take_steps, train_plain
from tests.worlds import run_in_fake_world

pytestmark = pytest.mark.usefixtures("context_per_thread")


def inputs(steps: int, rows: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    drawn = torch.randn(steps, rows, *shape, generator=random, dtype=torch.float64)
    return list(drawn.to(dtype) * 3 + 7)


def train(norm: torch.nn.Module, batches: Sequence[torch.Tensor], whole: int) -> dict[str, torch.Tensor]:
    """Outputs, gradients and buffers after some steps; losses are the rows' sum over the whole batch's rows."""
    told: dict[str, torch.Tensor] = {}
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = norm(x)
        factors = torch.arange(1.0, y.size(1) + 1).view(1, -1, *[1] * (y.dim() - 2))
        (y.pow(3) * factors).sum().div(whole).backward()
        assert x.grad is not None
        told |= {"y": y.detach(), "x": x.grad}
    grads = {name: p.grad for name, p in norm.named_parameters() if p.grad is not None}
    return told | grads | {name: value.double() for name, value in norm.named_buffers()}


PLAIN: dict[int, Any] = {1: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d, 4: torch.nn.BatchNorm3d}


@pytest.mark.parametrize(
    ("shape", "cuts", "options"),
    [
        ((3,), [4, 1, 3], {}),
        ((2, 3, 2), [1, 5], {"momentum": None}),
        ((2, 2, 1, 2), [3, 0, 2], {"affine": False}),
        ((4,), [2, 2], {"track_running_stats": False, "eps": 1e-3}),
    ],
)
def test_it_equals_batch_norm_of_all_rows(shape: list[int], cuts: list[int], options: dict[str, Any]) -> None:
    whole = inputs(3, sum(cuts), shape, torch.float64)
    expected = train(PLAIN[len(shape)](shape[0], **options).double(), whole, sum(cuts))

    def work(group: Group) -> dict[str, torch.Tensor]:
        first = sum(cuts[: group.rank])
        mine = [batch[first : first + cuts[group.rank]] for batch in whole]
        return train(hvd.SyncBatchNorm(shape[0], **options).double(), mine, sum(cuts))

    parts = run_in_fake_world(len(cuts), work)
    assert all(part.keys() == expected.keys() for part in parts)
    for name, value in expected.items():
        if name in ("y", "x"):
            got = torch.cat([part[name] for part in parts])
        elif name in ("weight", "bias"):
            got = torch.stack([part[name] for part in parts]).sum(0)
        else:
            assert all(torch.equal(part[name], parts[0][name]) for part in parts)
            got = parts[0][name]
        assert float((got - value).abs().max() / value.abs().max().clamp(min=1e-30)) < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sync_batch_norm_of_16_bit_floats_is_close_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    (whole,) = inputs(1, 6, (3,), dtype)

    def work(group: Group) -> torch.Tensor:
        result: torch.Tensor = hvd.SyncBatchNorm(3)(whole[3 * group.rank :][:3])
        return result

    got = torch.cat(run_in_fake_world(2, work))
    assert got.dtype == dtype
    expected = torch.nn.BatchNorm1d(3).double()(whole.double())
    assert float((got.double() - expected).detach().abs().max()) < (0.02 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_its_parameters_keep_their_own_precision(dtype: torch.dtype) -> None:
    """A sum over so many rows is beyond float16, and between two numbers of bfloat16."""
    rows = 80_001

    def work(group: Group) -> torch.Tensor:
        norm = hvd.SyncBatchNorm(2)
        norm(torch.ones(rows, 2, dtype=dtype)).sum().backward()
        assert norm.bias.grad is not None
        return norm.bias.grad

    for gradient in run_in_fake_world(2, work):
        assert gradient.tolist() == [rows, rows]


def test_second_derivatives_are_refused_rather_than_wrong() -> None:
    def work(group: Group) -> None:
        x = torch.randn(4, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(hvd.SyncBatchNorm(2)(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward()

    run_in_fake_world(2, work)


def test_evaluation_exchanges_nothing() -> None:
    def work(group: Group) -> list[float]:
        norm = hvd.SyncBatchNorm(2).eval()
        return norm(torch.full((1, 2), 3.0)).flatten().tolist() if group.rank == 0 else []

    assert run_in_fake_world(2, work)[0] == pytest.approx([3.0, 3.0], rel=1e-4)


def test_sync_batch_norm_refuses_inputs_of_another_shape() -> None:
    with pytest.raises(InvalidInput, match="SyncBatchNorm of 3 features"):
        hvd.SyncBatchNorm(3)(torch.ones(2, 4))


@pytest.mark.parametrize(("size", "one_bucket"), [(1, False), (3, False), (3, True)])
def test_r09_statistics_are_those_of_all_rows_of_the_step(size: int, one_bucket: bool) -> None:
    """Shares of 4, 0 and 6 rows, and micro-batches of 3, which such a net is not cut into."""
    net = nn.Sequential(nn.Linear(5, 6), SyncBatchNorm(6), nn.Linear(6, 3)).double()
    shares = [range(ROWS)] if size == 1 else [range(4), range(4, 4), range(4, ROWS)]
    divide = lambda group: shares[group.rank]  # noqa: E731
    work = partial(take_steps, model=net, steps=2, divide=divide, one_bucket=one_bucket)
    replicas = [trainee for trainee, _ in run_in_fake_world(size, work)]
    assert len({replica.state.digest() for replica in replicas}) == 1
    assert have_equal_values(replicas[0].model, train_plain(net, steps=2))


def drop_rows(rows: list[int], *words: int) -> torch.Tensor:
    layer = RowDropout(0.25)
    draw_rows(layer, np.array(rows), *words)
    out: torch.Tensor = layer(torch.ones(len(rows), 3, 50, dtype=torch.float64))
    return out


def test_r09_a_rows_mask_depends_on_the_row_and_the_words_alone() -> None:
    whole = drop_rows(list(range(40)), 1, 2)
    assert torch.equal(drop_rows([7, 3], 1, 2), whole[[7, 3]])
    assert not torch.equal(drop_rows([7], 1, 3), whole[[7]])
    assert set(whole.unique().tolist()) == {0.0, 1 / 0.75}
    assert float((whole == 0).double().mean()) == pytest.approx(0.25, abs=0.02)


def test_two_layers_draw_differently_and_gradients_follow_the_mask() -> None:
    net = torch.nn.Sequential(RowDropout(0.5), RowDropout(0.5))
    draw_rows(net, np.arange(50), 1)
    x = torch.ones(50, 8, requires_grad=True)
    net(x).sum().backward()
    assert x.grad is not None
    assert float((x.grad == 4).float().mean()) == pytest.approx(0.25, abs=0.1)


def test_row_dropout_needs_rows_in_training_and_does_nothing_outside_of_it() -> None:
    layer, x = RowDropout(0.5), torch.ones(2, 3)
    with pytest.raises(InvalidInput, match=r"got 2 rows, draw_rows\(\) was called for none"):
        layer(x)
    draw_rows(layer, np.arange(3), 1)
    with pytest.raises(InvalidInput, match=r"draw_rows\(\) was called for 3"):
        layer(x)
    assert torch.equal(layer.eval()(x), x)
    with pytest.raises(InvalidInput, match="without 1"):
        RowDropout(1.0)
    assert describe_world_dependence(torch.nn.Sequential(RowDropout(0.5))) is None
