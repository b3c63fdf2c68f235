"""`join`, of ranks that are out of data, beside operations and optimizers of those that are not."""

from __future__ import annotations

import contextlib

import pytest
import torch

import spark_elastic.torch as hvd
from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from tests.unit.torch.worlds import World


def test_ranks_out_of_data_join(world: World) -> None:
    def work(group: Group) -> tuple[list[float], int]:
        sums = [hvd.allreduce(torch.ones(1), op=hvd.Sum).item() for _ in range(2 - group.rank)]
        return sums, hvd.join()

    assert world(3, work) == [([2.0, 1.0], 0), ([2.0], 0), ([], 0)]


def test_ranks_out_of_data_take_part_in_the_steps_of_others(world: World) -> None:
    def work(group: Group) -> tuple[float, int]:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        for step in range(3 - group.rank):
            optimizer.zero_grad()
            (weight * 3.0).sum().backward()
            optimizer.step()
            if step % 2:
                hvd.allreduce(torch.ones(1), name="metric")
        last = hvd.join()
        hvd.broadcast_parameters({"w": weight}, last)
        second = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        with pytest.raises(InvalidInput, match="2 optimizers"):
            hvd.join()
        for one in (optimizer, second):
            one.close()
        return weight.item(), last

    assert world(3, work) == [(-6.0, 0)] * 3  # three ranks' average of 3, then of two and of one over three


def test_join_with_pending_gradients_is_refused(world: World) -> None:
    def work(group: Group) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(2))
        with contextlib.closing(
            hvd.DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), op=hvd.Sum, backward_passes_per_step=2
            )
        ) as optimizer:
            for batch in range(4 - group.rank):
                weight.sum().backward()
                if batch % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            if group.rank == 1:
                with pytest.raises(InvalidInput, match=r"call step\(\) first"):
                    hvd.join()
                optimizer.step()
                optimizer.zero_grad()
            hvd.join()
        return weight.tolist()

    assert world(2, work) == [[-7.0, -7.0]] * 2


def test_ranks_join_beside_adasum(world: World) -> None:
    def work(group: Group) -> tuple[list[float], int]:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        with contextlib.closing(
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], op=hvd.Adasum)
        ) as optimizer:
            for _ in range(3 - group.rank):
                optimizer.zero_grad()
                (weight * torch.tensor([3.0, 4.0])).sum().backward()
                optimizer.step()
            return weight.tolist(), hvd.join()

    # Equal steps combine to one of them, and with nothing to that one.
    assert world(2, work) == [([-9.0, -12.0], 0), ([-6.0, -8.0], 0)]


def test_the_rank_with_most_steps_counts_as_the_last_of_a_process_set_to_join(world: World) -> None:
    def work(group: Group) -> tuple[float, int]:
        part = hvd.add_process_set([0, 1])
        weight = torch.nn.Parameter(torch.zeros(1))
        with contextlib.closing(
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], process_set=part)
        ) as optimizer:
            for _ in range((2, 1, 5)[group.rank]):
                optimizer.zero_grad()
                weight.sum().backward()
                optimizer.step()
            last = hvd.join()
        hvd.remove_process_set(part)
        return weight.item(), last

    assert world(3, work) == [(-1.5, 0), (-1.0, 0), (-5.0, 0)]
