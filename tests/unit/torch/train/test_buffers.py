"""Buffers over the ranks: means by rows, and nothing done to what nobody wrote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from elastic_collectives import Group
from spark_elastic.torch.train.forward import BufferExchange, BufferSnapshot
from tests.unit.torch.worlds import run_in_world


class NetWithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("table", torch.tensor([0.1, 0.7]))
        self.register_buffer("running", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("rotation", torch.tensor([1j]))


def test_written_buffers_are_averaged_and_others_keep_their_bits() -> None:
    """Rank 2 has no rows; a mask of infinities must survive its zero share."""

    def work(group: Group) -> NetWithMask:
        holder, rows = NetWithMask(), (3, 1, 0)[group.rank]
        before = BufferSnapshot(holder, holder.modules())
        exchange = BufferExchange(holder)
        if rows:
            holder.get_buffer("running").add_(rows)
            holder.get_buffer("count").add_(rows)
            holder.get_buffer("seen").fill_(rows == 1)
        exchange.exchange(group, before, rows, 4)
        exchange.apply()
        return holder

    for holder in run_in_world(3, work):
        assert holder.get_buffer("running").tolist() == [2.5, 2.5]
        assert holder.get_buffer("count").item() == 3
        assert holder.get_buffer("seen").item() is True
        for name in ("mask", "table", "rotation"):
            assert torch.equal(holder.get_buffer(name), NetWithMask().get_buffer(name))


def test_buffers_that_no_rank_has_changed_are_not_sent() -> None:
    class NetWithLargeMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1000, dtype=torch.bool))
            self.register_buffer("positions", torch.ones(1000))
            self.register_buffer("mean", torch.zeros(3))

    sent: list[tuple[int, str]] = []

    def allreduce(array: Any, op: str, compression: str | None = None) -> None:
        assert compression is None
        sent.append((len(array), op))

    group: Any = SimpleNamespace(allreduce=allreduce)
    model = NetWithLargeMask()
    exchange, before = BufferExchange(model), BufferSnapshot(model, model.modules())
    exchange.exchange(group, before, 1, 1)
    assert sent == [(3, "max")]
    model.get_buffer("mean").add_(1)
    exchange.exchange(group, before, 1, 1)
    assert sent[1:] == [(3, "max"), (3, "sum")]


def test_a_model_without_buffers_sends_nothing() -> None:
    model = nn.Linear(1, 1)

    def work(group: Group) -> None:
        exchange = BufferExchange(model)
        if group.rank == 0:  # a collective would wait for the other rank
            exchange.exchange(group, BufferSnapshot(model, model.modules()), 1, 1)
            exchange.apply()

    run_in_world(2, work)
