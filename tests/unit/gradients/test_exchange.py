"""Gradients summed over a world: what ranks must have in common, when a thread lives, whom a stalled step waits for."""

from __future__ import annotations

import copy
import logging
import math
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_collectives import CollectiveTimeout, Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients import host_memory
from spark_elastic.gradients.buckets import ALIGN, FIRST_BUCKET, ParameterSpec, build_buckets, hash_layout
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.layout import BucketMemory, build_specs
from spark_elastic.gradients.modes import HostMode, OneBucketMode
from spark_elastic.gradients.reduction import ExchangeOptions, options_from_env
from tests.worlds import run_in_world


def backward(model: nn.Module, inputs: int) -> None:
    model(torch.ones(2, inputs)).sum().backward()


@pytest.mark.parametrize(
    ("inputs", "other", "words"),
    [
        # Both have one bucket of 15 elements, so that the sizes on the wire agree.
        (
            3,
            ExchangeOptions(),
            r"ranks \[1\] .*number 1: on rank 0, 'weight' is .*3, 5\); on rank 1, .*\(5, 3\)",
        ),
        (
            5,
            ExchangeOptions(average=True),
            "averaged, .*: refused, in 0 groups; on rank 1, gradients are sum",
        ),
        (5, ExchangeOptions(wire="fp16"), "on rank 1, gradients are summed, sent as fp16"),
        (5, ExchangeOptions(predivide=2.0), "divided by 2.0 before"),
        (5, ExchangeOptions(bucket_bytes=4), "buckets are cut differently"),
    ],
)
def test_r07_ranks_agree_on_layout_and_options_before_data(
    inputs: int, other: ExchangeOptions, words: str
) -> None:
    def work(group: Group) -> None:
        width = inputs if group.rank else 5
        model = nn.Linear(width, 15 // width, bias=inputs == 5)
        options = ExchangeOptions() if (group.rank == 0) != other.average else other
        with closing(GradientExchange(model.named_parameters(), options)) as exchange:
            exchange.clear_and_begin(group, 1)
            backward(model, width)
            mine = model.weight.grad
            assert mine is not None
            with pytest.raises(MismatchError, match=words):
                exchange.finish()
            assert torch.equal(mine, torch.full_like(mine, 2.0)), "something was added to it"

    run_in_world(2, work)


def test_r07_ranks_agree_once_in_each_world() -> None:
    gathered = []

    models = [nn.Linear(4, 3) for _ in range(2)]
    exchanges = [GradientExchange(model.named_parameters()) for model in models]

    def work(group: Group) -> None:
        allgather = group.allgather
        group.allgather = lambda array: gathered.append(group.fence) or allgather(array)  # type: ignore[method-assign,func-returns-value]
        for _ in range(3):
            exchanges[group.rank].clear_and_begin(group, 1)
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
    how: Any = {"options": ExchangeOptions(wire=wire), "count_message_bytes": lambda count: MESSAGE}
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
def test_r06_messages_travel_on_all_ranks_or_on_none(options: ExchangeOptions, lacks_room: bool) -> None:
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
        (nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64: only"),
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


def test_the_stall_check_names_parameters_and_ranks_of_the_world(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Group) -> None:
        if group.rank in (1, 3):
            step(group.subgroup(1, [1, 3]), ExchangeOptions(warn_after=2.5), (0.0, 3.5))
        group.barrier()

    with caplog.at_level(logging.WARNING, "spark_elastic.gradients.step_reducer"):
        run_in_world(4, work)
    (line,) = caplog.messages
    assert line.startswith("gradients of '1.bias', '1.weight', '0.bias' and 1 more have been waiting for 3 s")
    assert line.endswith("for rank(s) 3, which have not sent theirs.")


def test_gradients_alone_fail_after_wait_at_most(caplog: pytest.LogCaptureFixture) -> None:
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


SHAPES = st.lists(st.integers(0, 1 << 11), max_size=2).map(tuple)
DTYPES = st.sampled_from([("float32", 4), ("float64", 8)])


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpec]:
    kinds = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=30))
    return [ParameterSpec(f"p{i}", shape, *dtype) for i, (shape, dtype) in enumerate(kinds)]


@given(models(), st.integers(1, 4 * FIRST_BUCKET))
def test_r07_every_parameter_is_once_in_a_bucket_of_its_dtype(specs: list[ParameterSpec], size: int) -> None:
    buckets = build_buckets(specs, size)
    order = [part.index for bucket in buckets for part in bucket.slices]
    assert order == list(reversed(range(len(specs))))
    for number, bucket in enumerate(buckets):
        end = 0
        for part in bucket.slices:
            spec = specs[part.index]
            assert part.numel == spec.numel
            assert spec.dtype == bucket.dtype
            assert part.offset >= end
            assert part.offset * spec.itemsize % ALIGN == 0
            end = part.offset + part.numel
        assert bucket.numel >= end
        limit = FIRST_BUCKET if number == 0 else size
        assert len(bucket.slices) == 1 or end * specs[bucket.slices[0].index].itemsize <= limit


@given(models(), st.integers(1, 1 << 24))
def test_r07_different_layouts_have_different_hashes(specs: list[ParameterSpec], size: int) -> None:
    same = hash_layout(specs, size)
    assert same == hash_layout([replace(spec) for spec in specs], size)
    assert same < 1 << 64
    first = specs[0]
    for change in ({"name": "q"}, {"shape": (*first.shape, 1)}, {"dtype": "int8"}):
        other = replace(first, **change)  # type: ignore[arg-type]
        assert hash_layout([other, *specs[1:]], size) != same
    assert hash_layout(specs, size + 1) != same


def test_the_first_bucket_is_small_so_that_it_is_sent_early() -> None:
    specs = [ParameterSpec(f"p{i}", (1 << 16,), "float32", 4) for i in range(64)]
    first, second, *_ = build_buckets(specs, 1 << 22)
    assert first.numel * 4 == FIRST_BUCKET
    assert second.numel * 4 == 1 << 22


class Memory:
    """What a `BucketMemory` asks of a group when it is made."""

    def buffer(self, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("meta", 1)])
def test_exchange_of_gpu_gradients_through_the_host_is_logged_once(
    device: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    group = Memory()
    host_memory.warn_about_gpus.cache_clear()
    parameters = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    buckets = build_buckets(build_specs(["a", "b"], parameters), bucket_bytes=1)
    for _ in range(2):  # in the next world, too, it is known
        BucketMemory(parameters, buckets, group)  # type: ignore[arg-type]
    assert len(buckets) == 2
    told = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert told == ["tensors of GPUs are exchanged through the host"] * times
