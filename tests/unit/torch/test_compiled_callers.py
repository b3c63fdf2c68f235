"""What is compiled around exchanges gives what it gives otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from elastic_collectives import Group
from tests.unit.ops.workers import run_in_fake_world, use_context_per_thread


def train(compiled: Callable[[Any], Any], group: Group) -> list[float]:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), hvd.SyncBatchNorm(2), torch.nn.Linear(2, 1))
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    model, step = compiled(net), compiled(optimizer.step)
    features = torch.arange(6.0).view(3, 2).square() * (group.rank + 1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(features).square().sum()
        loss.backward()
        step()
    optimizer.close()
    average = compiled(lambda value: hvd.allreduce(2 * value) + 1)(loss.detach())
    return [average.item(), *torch.nn.utils.parameters_to_vector(net.parameters()).tolist()]


@pytest.mark.faults  # for its time
@pytest.mark.filterwarnings("ignore")  # those of torch's compiler
def test_torch_compile_works_with_models_steps_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    use_context_per_thread(monkeypatch)
    expected = run_in_fake_world(2, partial(train, lambda function: function))
    compiled = run_in_fake_world(2, partial(train, partial(torch.compile, backend="eager")))
    assert compiled[0] == compiled[1] == pytest.approx(expected[0])
