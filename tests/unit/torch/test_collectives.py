"""Horovod's collectives and objects over worlds of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from elastic_collectives import Group, MismatchError
from tests.unit.torch.worlds import World


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_allreduce_averages_and_sums(engine: World, dtype: torch.dtype) -> None:
    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        mine = torch.tensor([[1, 2], [3, 4 * (group.rank + 1)]], dtype=dtype)
        return hvd.allreduce(mine), hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)

    for average, total in engine(3, work):
        assert average.dtype == total.dtype == dtype
        assert average.tolist() == [[1, 2], [3, 8]]
        assert total.tolist() == [[3, 6], [9, 24]]


def test_ranks_gather_different_lengths(engine: World) -> None:
    def work(group: Group) -> list[list[int]]:
        return hvd.allgather(torch.full((group.rank, 2), group.rank, dtype=torch.int16)).tolist()

    assert engine(3, work) == [[[1, 1], [2, 2], [2, 2]]] * 3


def test_shapes_that_do_not_fit_name_the_ranks(engine: World) -> None:
    def work(group: Group) -> None:
        with pytest.raises(MismatchError, match=r"rank 0 has shapes \(-1, 2\), rank 1 \(-1, 3\)") as error:
            hvd.allgather(torch.ones(2, 2 + group.rank))
        assert error.value.ranks == (1,)

    engine(2, work)


def test_broadcasts_give_every_rank_the_roots_values(engine: World) -> None:
    def work(group: Group) -> tuple[list[float], list[float], dict[str, int]]:
        mine = torch.full((2,), float(group.rank), dtype=torch.bfloat16)
        got = hvd.broadcast(mine, 1)
        assert mine.tolist() == [group.rank] * 2
        hvd.broadcast_(mine, 2)
        return got.tolist(), mine.tolist(), hvd.broadcast_object({"of": group.rank}, 1)

    assert engine(3, work) == [([1.0, 1.0], [2.0, 2.0], {"of": 1})] * 3


def test_objects_are_gathered_and_broadcast(engine: World) -> None:
    def work(group: Group) -> list[Any]:
        hvd.barrier()
        return hvd.allgather_object("x" * group.rank)

    assert engine(3, work) == [["", "x", "xx"]] * 3


def test_parameters_and_optimizer_state_are_broadcast(engine: World) -> None:
    def work(group: Group) -> tuple[list[float], float, int]:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(model.weight, float(group.rank))
        opt = torch.optim.Adam(model.parameters(), lr=0.1 * (group.rank + 1))
        for _ in range(group.rank + 1):
            model(torch.ones(1, 2)).sum().backward()
            opt.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(opt, root_rank=1)
        steps = int(opt.state[model.weight]["step"])
        return model.weight.detach().flatten().tolist(), opt.param_groups[0]["lr"], steps

    results = engine(2, work)
    assert results[0] == results[1]
    assert results[0][1:] == (0.2, 2)


@pytest.mark.parametrize("listed", [torch.nn.Module.named_parameters, torch.nn.Module.parameters])
def test_parameters_with_and_without_names(engine: World, listed: Callable[..., Any]) -> None:
    def work(group: Group) -> list[float]:
        model = torch.nn.Linear(2, 2)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float(group.rank))
        hvd.broadcast_parameters(list(listed(model)), root_rank=1)
        return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()

    assert engine(2, work) == [[1.0] * 6] * 2


def test_collectives_are_differentiable(engine: World) -> None:
    def work(group: Group) -> tuple[list[float], list[float], list[float]]:
        x, y, z = (torch.ones(2, requires_grad=True) for _ in range(3))
        (hvd.allreduce(x) * (group.rank + 1)).sum().backward()
        (hvd.allgather(y) * torch.arange(4.0)).sum().backward()
        (hvd.broadcast(z, 1) * (group.rank + 1)).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert z.grad is not None
        return x.grad.tolist(), y.grad.tolist(), z.grad.tolist()

    assert engine(2, work) == [
        ([1.5, 1.5], [0.0, 1.0], [0.0, 0.0]),
        ([1.5, 1.5], [2.0, 3.0], [1.5, 1.5]),
    ]
