"""Operations and optimizers over a process set whose member is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from elastic_collectives import CollectiveError, Group
from spark_elastic.worker import context
from tests.unit.ops.workers import enter_group, use_context_per_thread
from tests.unit.torch.worlds import run_in_world

pytestmark = pytest.mark.native

Exchange = Callable[[], object]


def _operation(process_set: hvd.ProcessSet) -> Exchange:
    return lambda: hvd.allreduce(torch.ones(1), process_set=process_set)


def _step(op: Any) -> Callable[[hvd.ProcessSet], Exchange]:
    def make_exchange(process_set: hvd.ProcessSet) -> Exchange:
        weight = torch.nn.Parameter(torch.ones(3))
        opt = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), [("weight", weight)], op=op, process_set=process_set
        )

        def step() -> None:
            opt.zero_grad()
            weight.sum().backward()
            opt.step()

        return step

    return make_exchange


def _find_error_of_rank_1(group: Group, make: Callable[[hvd.ProcessSet], Exchange]) -> CollectiveError | None:
    hvd.init()
    pair = hvd.add_process_set([1, 2])
    if group.rank == 0:
        return None
    exchange = make(pair)
    exchange()
    if group.rank == 2:
        group.close()
        return None
    with pytest.raises(CollectiveError) as broke:
        exchange()
    return broke.value


@pytest.mark.parametrize("make", [_operation, _step(hvd.Sum), _step(hvd.Adasum)])
def test_an_error_of_a_process_set_names_ranks_of_the_world(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[hvd.ProcessSet], Exchange]
) -> None:
    use_context_per_thread(monkeypatch)

    def work_as(group: Group) -> CollectiveError | None:
        enter_group(group)
        try:
            return _find_error_of_rank_1(group, make)
        finally:
            worker = context.get_context()
            assert worker is not None
            worker.group_context.collective_thread.close()

    _, error, _ = run_in_world(3, work_as)
    assert error is not None
    assert error.ranks == (2,)
    assert "(counted among ranks 1, 2)" in error.reason
