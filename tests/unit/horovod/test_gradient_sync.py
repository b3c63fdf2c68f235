"""Which group gradients travel in, and what the slot sees of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, add_process_set
from spark_elastic.handwritten.torch_state import OptimizerStateHandler
from spark_elastic.horovod.torch.gradient_sync import get_optimizers_in_use, get_training_group
from spark_elastic.torch import Adasum, DistributedOptimizer, Sum, join
from spark_elastic.worker.context import WaitRecorder, get_context, set_context
from tests.fake_group import FakeFabric
from tests.worlds import Runner, enter_group, run_in_fake_world, run_on_engine

pytestmark = pytest.mark.usefixtures("context_per_thread")


def test_a_wait_for_gradients_of_a_process_set_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, watched = WaitRecorder(), list[Group]()
    monkeypatch.setattr(recorder, "watch_group", lambda group: watched.append(group) or group)

    def work(group: Group) -> Group | None:
        worker = get_context()
        assert worker is not None
        set_context(replace(worker, wait_recorder=recorder if group.rank == 0 else WaitRecorder()))
        return get_training_group(ProcessSet([0, 1])) if group.rank < 2 else None

    first, *_ = run_in_fake_world(3, work)
    assert watched == [first]
    assert first is not None
    assert first.size == 2


def take_step(model: torch.nn.Module) -> None:
    """One step of size 1 along gradients of 1, by an optimizer that nobody holds any more afterwards."""
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_unreferenced_optimizer_is_freed() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    for _ in range(2):
        take_step(model)
    seen = weakref.ref(model)
    hooks = model.weight._post_accumulate_grad_hooks
    del model
    gc.collect()
    assert seen() is None
    assert not hooks
    assert not get_optimizers_in_use()


def test_an_optimizers_parameters_are_taken_on_by_another() -> None:
    """Each function of a job makes its own; join goes by the one that is in use."""

    def work(group: Group) -> tuple[float, int]:
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        for _ in range(2):
            take_step(model)
            gc.collect()
        last = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        if group.rank == 0:
            model(torch.ones(1, 3)).sum().backward()
            last.step()
        join()
        return float(model.weight.detach().mean()), len(get_optimizers_in_use())

    assert run_in_fake_world(2, work) == [(-2.5, 1), (-2.0, 1)]


def test_an_optimizer_made_behind_anothers_backward_does_not_step_before_it() -> None:
    """Rank 0 lacks a gradient: what the first one has sent by then differs."""

    def work(group: Group) -> list[float]:
        model, later, x = layers(), layers(), torch.ones(1, 4)
        first = make_optimizer(model)
        used = model if group.rank == 1 else [*model][:2]
        sum(layer(x).sum() for layer in used).backward()
        second = make_optimizer(later)
        sum(layer(x).sum() for layer in later).backward()
        if group.rank == 1:
            with pytest.raises(InvalidInput, match=r"are on their way: call its step\(\) first"):
                second.step()
        before = model[0].weight.detach().clone()
        first.step()
        second.step()
        return [round(float((before - model[0].weight.detach()).mean()), 3)]

    assert run_on_engine(2, work) == [[2.0]] * 2


def layers() -> torch.nn.ModuleList:
    return torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(3))


def make_optimizer(model: torch.nn.Module, op: Any = Sum) -> Any:
    """A bucket for each parameter, except for Adasum."""
    groups: Any = 0 if op is Adasum else [[parameter] for parameter in model.parameters()]
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=op, groups=groups)


@pytest.mark.parametrize("adasum", [False, True], ids=["sums", "one by Adasum"])
def test_r07_two_optimizers_of_one_backward_keep_apart(adasum: bool) -> None:
    """One rank has no gradient for the first bucket of one of them, so that the other's are complete before it."""

    def work(group: Group) -> list[float]:
        first, second = layers(), layers()
        optimizers = [make_optimizer(first), make_optimizer(second, Adasum if adasum else Sum)]
        parameters = [*first.parameters(), *second.parameters()]
        before = [parameter.detach().clone() for parameter in parameters]
        used = [layer for layer in first if group.rank == 1 or layer is not first[2]]
        x = torch.ones(1, 4)
        (sum(100 * layer(x).sum() for layer in second) + sum(layer(x).sum() for layer in used)).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
        pairs = zip(before, parameters, strict=True)
        return [round(float((was - now.detach()).mean()), 3) for was, now in pairs]

    of_second = 100.0 if adasum else 200.0  # equal steps count once
    assert run_on_engine(2, work) == [[2.0, 2.0, 1.0, *[of_second] * 3]] * 2


def test_the_buckets_of_one_optimizer_travel_during_backward() -> None:

    def work(group: Group) -> list[bool]:
        model, other = layers(), layers()
        optimizer, found = make_optimizer(model), []
        for together in (False, True, False):
            second = DistributedOptimizer(torch.optim.SGD(other.parameters())) if together else None
            sum(layer(torch.ones(1, 4)).sum() for layer in model).backward()  # type: ignore[union-attr]
            found.append(optimizer._sync.exchange.mode.has_launched_buckets)
            optimizer.step()
            del second
        return found

    assert run_on_engine(2, work) == [[True, False, True]] * 2


def test_gradients_of_a_rank_outside_of_the_set_are_void_in_the_next_world() -> None:
    """It trains alone in both of them."""
    enter_group(FakeFabric(3).group(2))
    model = torch.nn.Linear(3, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), process_set=add_process_set([0, 1]))
    model(torch.ones(1, 3)).sum().backward()
    enter_group(FakeFabric(3, fence=(1, 2)).group(2))
    OptimizerStateHandler(optimizer).reset()
    assert model.weight.grad is None
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


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
def test_an_error_of_a_process_set_names_ranks_of_the_world(engine: Runner, make: Any) -> None:
    _, error, _ = engine(3, lambda group: _find_error_of_rank_1(group, make))
    assert error is not None
    assert error.ranks == (2,)
    assert "(counted among ranks 1, 2)" in error.reason
