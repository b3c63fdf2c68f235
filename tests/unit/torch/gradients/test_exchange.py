"""Gradients summed over a world: what ranks must have in common, when a thread lives, whom a stalled step waits for."""

from __future__ import annotations

import copy
import logging
import math
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_collectives import CollectiveTimeout, Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.modes import HostMode, OneBucketMode
from spark_elastic.gradients.reduction import ExchangeOptions, options_from_env
from tests.unit.torch.worlds import run_in_world


def backward(model: nn.Module, inputs: int) -> None:
    model(torch.ones(2, inputs)).sum().backward()


def test_r07_the_layouts_hash_precedes_data() -> None:
    """Both have one bucket of 15 elements, so that the sizes on the wire agree."""

    def work(group: Group) -> None:
        inputs = 5 if group.rank == 0 else 3
        model = nn.Linear(inputs, 15 // inputs, bias=False)
        with closing(GradientExchange(model.named_parameters())) as exchange:
            exchange.clear_and_begin(group, 1)
            backward(model, inputs)
            mine = model.weight.grad
            assert mine is not None
            says = r"ranks \[1\] .*number 1: on rank 0, 'weight' is .*3, 5\); on rank 1, .*\(5, 3\)"
            with pytest.raises(MismatchError, match=says):
                exchange.finish()
            assert torch.equal(mine, torch.full_like(mine, 2.0))  # nothing was added to it

    run_in_world(2, work)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            ExchangeOptions(average=True),
            "averaged, .*: refused, in 0 groups; on rank 1, gradients are summed",
        ),
        (ExchangeOptions(wire="fp16"), "on rank 1, gradients are summed, sent as fp16"),
        (ExchangeOptions(predivide=2.0), "divided by 2.0 before"),
        (ExchangeOptions(bucket_bytes=4), "buckets are cut differently"),
    ],
)
def test_r07_ranks_agree_on_the_options_of_the_exchange(other: ExchangeOptions, words: str) -> None:
    def work(group: Group) -> None:
        model = nn.Linear(5, 3)
        terms = ExchangeOptions() if (group.rank == 0) != other.average else other
        with closing(GradientExchange(model.named_parameters(), terms)) as exchange:
            exchange.clear_and_begin(group, 1)
            backward(model, 5)
            with pytest.raises(MismatchError, match=words):
                exchange.finish()

    run_in_world(2, work)


def test_r07_ranks_agree_once_in_each_world() -> None:
    gathered = []

    class CountingGroup:
        def __init__(self, group: Group) -> None:
            self.group, self.rank, self.size, self.fence = group, group.rank, group.size, group.fence

        def allgather(self, array: Any) -> Any:
            gathered.append(self.fence)
            return self.group.allgather(array)

        def allreduce(self, array: Any, **how: Any) -> None:
            self.group.allreduce(array, **how)

        def buffer(self, nbytes: int) -> Any:
            return self.group.buffer(nbytes)

    models = [nn.Linear(4, 3) for _ in range(2)]
    exchanges = [GradientExchange(model.named_parameters()) for model in models]

    def work(group: Group) -> None:
        counting: Any = CountingGroup(group)
        for _ in range(3):
            exchanges[group.rank].clear_and_begin(counting, 1)
            backward(models[group.rank], 4)
            exchanges[group.rank].finish()

    for generation in (1, 2):
        run_in_world(2, work, generation)
    for exchange in exchanges:
        exchange.close()
    assert sorted(gathered) == [(1, 1), (1, 1), (1, 2), (1, 2)]


def test_r07_hooks_of_several_devices_come_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has a thread for each device. Here a second one comes while the first one is about to send a bucket."""
    lacking, launch = list[int](), HostMode._launch_next_bucket

    def launch_recorded(mode: HostMode) -> None:
        lacking.append(mode._missing[mode._launched])
        launch(mode)

    monkeypatch.setattr(HostMode, "_launch_next_bucket", launch_recorded)

    def work(group: Group) -> list[float]:
        parameters = [nn.Parameter(torch.zeros(4)) for _ in range(4)]
        second = threading.Thread(target=lambda: parameters[2].sum().backward())

        def start_second() -> bool:
            if group.rank == 0 and second.ident is None:
                second.start()
                second.join(0.3)
            return True

        named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
        options = ExchangeOptions(bucket_bytes=16)
        with closing(GradientExchange(named, options, may_overlap=start_second)) as exchange:
            exchange.clear_and_begin(group, 1)
            parameters[3].sum().backward()
            if second.ident is None:
                second.start()
            second.join()
            parameters[1].sum().backward()
            parameters[0].sum().backward()
            exchange.finish()
            return [float(parameter.grad.sum()) for parameter in parameters if parameter.grad is not None]

    assert run_in_world(2, work) == [[8.0] * 4] * 2
    assert lacking == [0] * 8


MESSAGE = 6  # bytes


KINDS = [(torch.float64, None), (torch.float16, None), *((torch.float32, w) for w in (None, "bf16", "fp16"))]


@pytest.mark.parametrize(("dtype", "wire"), KINDS)
def test_r06_messages_of_all_ranks_travel_with_the_only_bucket(dtype: torch.dtype, wire: str | None) -> None:
    """Of every byte; also where gradients are not finite. Between the worlds one process trains alone."""
    models = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype) for _ in range(3)]
    how: dict[str, Any] = {
        "options": ExchangeOptions(wire=wire),
        "count_message_bytes": lambda count: MESSAGE,
    }
    exchanges = [GradientExchange(model.named_parameters(), **how) for model in models]

    def work(group: Group) -> None:
        model, exchange = models[group.rank], exchanges[group.rank]
        for step in range(256 // MESSAGE + 1):
            exchange.clear_and_begin(group, 2)
            for passes in range(2 if group.rank else 0):  # rank 0 has no rows
                model[0](torch.full((2, 4), group.rank + passes, dtype=dtype)).sum().backward()
            if step == 1 and group.rank:
                model[0].weight.grad[0] = math.inf  # type: ignore[index]
            exchange.finish()
            assert exchange.mode.present.tolist() == [group.rank > 0] * 2 + [False] * 2
            if group.size == 1:
                continue
            assert isinstance(exchange.mode, OneBucketMode)
            firsts = [step * MESSAGE + rank for rank in range(group.size)]
            messages = [[(first + place) % 256 for place in range(MESSAGE)] for first in firsts]
            assert exchange.mode.carry(np.array(messages[group.rank], np.uint8)).tolist() == messages
            total = 2.0 * sum(2 * rank + 1 for rank in range(1, group.size))
            assert exchange.parameters[0].grad is not None
            assert exchange.parameters[0].grad[-1].tolist() == [total] * 4
            assert float(exchange.parameters[2].grad.abs().sum()) == 0  # type: ignore[union-attr]

    for generation, size in enumerate((2, 1, 3), start=1):
        run_in_world(size, work, generation)
    for exchange in exchanges:
        exchange.close()


@pytest.mark.parametrize(
    ("options", "lacks_room"),
    [
        (ExchangeOptions(), True),  # on one rank alone
        (ExchangeOptions(bucket_bytes=4), False),
        (ExchangeOptions(average=True), False),
        (ExchangeOptions(sparse="sparse"), False),
        (ExchangeOptions(shares=4), False),
    ],
)
def test_r06_no_message_travels_with_buckets_unless_it_can_on_all_ranks(
    options: ExchangeOptions, lacks_room: bool
) -> None:
    def work(group: Group) -> tuple[bool, bool]:
        model = nn.Linear(5, 3)
        count = (1 << 20) if lacks_room and group.rank else MESSAGE
        named = model.named_parameters()
        with closing(GradientExchange(named, options, count_message_bytes=lambda _: count)) as exchange:
            exchange.clear_and_begin(group, 1)
            return isinstance(exchange.mode, OneBucketMode), exchange.mode.follows_backward

    assert run_in_world(2, work) == [(False, True)] * 2


def test_a_lone_worker_needs_no_thread() -> None:
    model = nn.Linear(4, 3)
    threads = threading.active_count()
    with closing(GradientExchange(model.named_parameters())) as exchange:
        exchange.clear_and_begin(None, 1)
        backward(model, 4)
        exchange.finish()
        assert threading.active_count() == threads
    assert all(parameter.grad is None for parameter in model.parameters())


def test_r22_parameters_that_are_unfrozen_later_are_exchanged_also_with_a_newcomer() -> None:
    """Rank 1 is one in the second world: it has not seen that the first layer was trained for a while."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))

    def make() -> tuple[nn.Sequential, GradientExchange]:
        copied = copy.deepcopy(model)
        for layer in copied[:2]:
            layer.requires_grad_(False)
        return copied, GradientExchange(copied.named_parameters())

    def take_step(group: Group, net: nn.Sequential, exchange: GradientExchange, trained: list[bool]) -> None:
        for layer, flag in zip(net, trained, strict=True):
            layer.requires_grad_(flag)
        exchange.clear_and_begin(group, 1)
        backward(net, 4)
        own = copy.deepcopy(net)
        own.zero_grad()
        backward(own, 4)
        exchange.finish()
        exchange.drop_absent(exchange.mode.present)
        for ours, theirs in zip(net.parameters(), own.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(ours.grad, 2 * theirs.grad)

    held = [make(), make()]

    def work_first(group: Group) -> None:
        for trained in ([False, False, True], [True, False, True]):
            take_step(group, *held[group.rank], trained)

    def work_next(group: Group) -> None:
        take_step(group, *held[group.rank], [False, True, False])

    run_in_world(2, work_first)
    held.append(make())
    held[1][1].close()
    held[1] = held.pop()
    run_in_world(2, work_next, generation=2)
    for _, exchange in held:
        exchange.close()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}),
            "'w' is torch.complex64: only",
        ),
        (nn.Linear(2, 2, device="meta"), "'weight' is on meta, and has no values"),
        (nn.ReLU(), "no parameter that requires a gradient"),
    ],
)
def test_parameters_that_cannot_be_exchanged_are_named(model: nn.Module, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        GradientExchange(model.named_parameters())


CLOCK = SystemClock()


def step(group: Group, terms: ExchangeOptions, delays: tuple[float, ...] = (0.0, 0.0)) -> None:
    """Steps of two layers; rank 1 comes so many seconds late to each of them."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    with closing(GradientExchange(model.named_parameters(), terms)) as exchange:
        for delay in delays:
            exchange.clear_and_begin(group, 1)
            model(torch.ones(1, 2)).sum().backward()
            if group.rank == 1:
                CLOCK.sleep(delay)
            exchange.finish()


def test_the_stall_check_names_parameters_and_missing_ranks_as_the_worlds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(group: Group) -> None:
        if group.rank in (1, 3):
            step(group.subgroup(1, [1, 3]), ExchangeOptions(warn_after=2.5), (0.0, 3.5))
        group.barrier()

    with caplog.at_level(logging.WARNING, "spark_elastic.gradients.step_reducer"):
        run_in_world(4, work)
    (line,) = caplog.messages
    assert line.startswith("gradients of '1.bias', '1.weight', '0.bias' and 1 more have been waiting for 3 s")
    assert line.endswith("for rank(s) 3, which have not sent theirs.")


def test_gradients_fail_after_wait_at_most_and_later_collectives_have_the_usual_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(group: Group) -> None:
        step(group, ExchangeOptions(wait_at_most=0.5))
        if group.rank == 1:
            CLOCK.sleep(1.0)
        group.barrier()  # the group's timeout holds again
        with pytest.raises(CollectiveTimeout) as raised:
            step(group, ExchangeOptions(wait_at_most=0.5), (0.0, 1.5))
        assert raised.value.ranks == (1,)

    run_in_world(2, work)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (10.0, None)),
        ({"CHECK_TIME_SECONDS": "30", "SHUTDOWN_TIME_SECONDS": "90"}, (30.0, 90.0)),
        ({"CHECK_DISABLE": "1"}, (float("inf"), None)),
    ],
)
def test_horovods_settings_hold_for_gradients(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[float, float | None]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"HOROVOD_STALL_{name}", value)
    terms = options_from_env()
    assert (terms.warn_after, terms.wait_at_most) == found
