"""Buffers over the ranks: what one process would hold, a sentence, or nothing done to what nobody wrote."""

from __future__ import annotations

import gc
import logging
import random
import re
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.buffers import (
    BufferMerge,
    BufferSnapshot,
    describe_world_dependence,
    rng_state,
    set_rng_state,
)
from tests.unit.training.torch.trainees import ROWS, X, take_steps
from tests.worlds import run_in_world

SHARES = {1: [range(ROWS)], 2: [range(5), range(5, ROWS)], 3: [range(1), range(1, 6), range(6, ROWS)]}


# From a module with a buffer `kept`, rows and their numbers to what the buffer holds then, be it the same tensor.
Write = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Keeping(nn.Module):
    """Keeps something of the rows that it has seen, in a buffer of each of its parts."""

    def __init__(self, **parts: tuple[torch.Tensor, Write]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).double()
        for name, (value, write) in parts.items():
            self.add_module(name, nn.Module())
            part: Any = self.get_submodule(name)
            part.register_buffer("kept", value)
            part.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, None] == X).all(-1).nonzero()[:, 1]
        for part in self.children():
            if part is not self.layer:
                with torch.no_grad():
                    part.kept = part.write(part, x, rows)  # type: ignore[operator]
        return self.layer(x)  # type: ignore[no-any-return]


def count_rows(net: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    kept: torch.Tensor = net.kept.add_(len(x))
    return kept


def fill_bank(net: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    net.kept[rows] = x.mean(1).to(net.kept.dtype)
    kept: torch.Tensor = net.kept
    return kept


def register_late(net: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if not hasattr(net, "shift"):
        net.register_buffer("shift", x.mean(0), persistent=False)
    kept: torch.Tensor = net.kept
    return kept


WORLD = threading.local()  # its group, for code that exchanges rows


def push_all(net: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    everyones = torch.from_numpy(np.concatenate(WORLD.group.allgatherv(x[:, :1].contiguous().numpy())))
    return torch.cat([net.kept, everyones])[len(everyones) :]


WRITES: dict[str, tuple[torch.Tensor, Write]] = {
    "rows": (torch.tensor(7), count_rows),
    "rows in floats": (torch.zeros(()), count_rows),
    "batches": (torch.tensor(0), lambda net, x, rows: net.kept.add_(1)),
    "bank": (torch.full((ROWS,), -torch.inf), fill_bank),
    "bank of integers": (torch.full((ROWS,), 5, dtype=torch.int32), fill_bank),
    "sums of classes": (
        torch.zeros(3).double(),
        lambda net, x, rows: net.kept.index_add_(0, rows % 3, x.sum(1)),
    ),
    "moving average": (torch.zeros(5).double(), lambda net, x, rows: 0.9 * net.kept + 0.1 * x.mean(0)),
    "complex": (
        torch.zeros(1, dtype=torch.complex128),
        lambda net, x, rows: net.kept.lerp_(torch.complex(x[:, 0], x[:, 1]).mean()[None], 0.5),
    ),
    "largest": (torch.zeros(5).double(), lambda net, x, rows: torch.maximum(net.kept, x.amax(0))),
    "least": (torch.zeros(5).double(), lambda net, x, rows: torch.minimum(net.kept, x.amin(0))),
    "queue of all rows": (torch.zeros(40, 1).double(), push_all),
    "seen": (torch.zeros(ROWS, dtype=torch.bool), lambda net, x, rows: net.kept.index_fill_(0, rows, True)),
    "grown": (
        torch.arange(1.0),
        lambda net, x, rows: torch.arange(max(float(len(net.kept)), float(rows.max()) + 1)),
    ),
    "registered": (torch.zeros(1), register_late),
}


def divide(group: Group) -> range:
    WORLD.group = group
    return SHARES[group.size][group.rank]


def find_buffers(net: nn.Module, size: int) -> list[dict[str, torch.Tensor]]:
    """Of all ranks after some steps of all rows."""
    work = partial(take_steps, model=net, steps=2, batch_size=ROWS, divide=divide)
    return [dict(trainee.model.named_buffers()) for trainee, _ in run_in_world(size, work)]


def test_p2_all_ranks_hold_the_buffers_of_one_process() -> None:
    net = Keeping(**WRITES)
    (alone,) = find_buffers(net, 1)
    for size in SHARES:
        for found in find_buffers(net, size):
            assert found.keys() == alone.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-9, msg=name)


LOST = "buffer 'part.kept' of the model depends on all rows of a step in a way"


@pytest.mark.parametrize(
    ("value", "write", "says"),
    [
        (
            torch.zeros(40, 1).double(),
            lambda net, x, rows: torch.cat([net.kept, x[:, :1]])[len(x) :],
            LOST,
        ),
        (
            torch.ones(3).double(),
            lambda net, x, rows: net.kept.mul_(0.9).index_add_(0, rows % 3, 0.1 * x.sum(1)),
            LOST,
        ),
        (
            torch.zeros(0, 1).double(),
            lambda net, x, rows: torch.cat([net.kept, x[:, :1]]),
            r"shapes \(torch.float64 \[1, 1\] on rank 0; .* on rank 2\)",
        ),
    ],
)
def test_a_buffer_that_ranks_cannot_bring_together_is_named(value: Any, write: Any, says: str) -> None:
    """On all ranks alike; with one worker it is right."""
    (alone,) = find_buffers(Keeping(part=(value, write)), 1)
    assert alone["part.kept"].any()
    with pytest.raises(InvalidInput, match=says):
        find_buffers(Keeping(part=(value, write)), 3)


def test_statistics_of_an_own_layer_are_averaged_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    track: Write = lambda net, x, rows: 0.9 * net.kept + 0.1 * x.var(0)  # noqa: E731
    with caplog.at_level(logging.WARNING, "spark_elastic"):
        found = find_buffers(Keeping(part=(torch.ones(5).double(), track)), 2)
    assert torch.equal(found[0]["part.kept"], found[1]["part.kept"])
    (line,) = caplog.messages
    assert line.startswith("the workers' values of the buffer 'part.kept' are averaged by rows")


def test_trying_a_forward_pass_changes_nothing_of_the_model() -> None:
    class Momentum(nn.Module):
        """Averages its weights in forward, and counts its calls."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.slow = nn.Linear(5, 3).double(), nn.Linear(5, 3).double().requires_grad_(False)
            self.register_buffer("mean", torch.zeros(3).double())
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
                    slow.data = 0.5 * slow.data + 0.5 * fast.data
                self.mean.lerp_(self.slow(x).mean(0), 0.1)
            return self.layer(x)  # type: ignore[no-any-return]

    torch.manual_seed(1)
    net = Momentum()

    work = partial(take_steps, model=net, batch_size=ROWS, divide=divide)
    ((alone, _),) = run_in_world(1, work)
    for trainee, _ in run_in_world(2, work):
        assert trainee.model.calls == alone.model.calls == 1
        torch.testing.assert_close(trainee.model.slow.weight, alone.model.slow.weight)  # type: ignore[union-attr]


def test_buffers_that_no_rank_has_changed_are_not_sent() -> None:
    class NetWithLargeMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1000, dtype=torch.bool))
            self.register_buffer("positions", torch.ones(1000))
            self.register_buffer("mean", torch.zeros(3))

    sent: list[int] = []

    def allgather(array: Any) -> Any:
        sent.append(array.nbytes)
        return array[None]

    def reduce(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
        sent.append(tensors[0].nbytes)
        return tensors[0]

    group: Any = SimpleNamespace(allgather=allgather)
    model = NetWithLargeMask()
    rows = LocalBatch(1, np.arange(1), (), (), None)
    before = BufferSnapshot(model, model.modules())
    for change in (0, 1):
        model.get_buffer("mean").add_(change)
        merge = BufferMerge(model, {"mean": "mean"})
        merge.take(before, 0, 1.0)
        merge.exchange(group, before, rows, lambda model, part: None, reduce)
    assert sent == [8, 8, 24]


class NetReplacingItsBuffer(nn.Module):
    """Its forward pass puts a new tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_mean = self.running_mean * 0.5
        return x * self.running_mean


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), NetReplacingItsBuffer()])
def test_r03_buffers_come_back(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = BufferSnapshot(model, model.modules())

    def has_changed() -> bool:
        return snapshot.find_changed([("0.running_mean", model.get_buffer("0.running_mean"))]) == [True]

    model(torch.randn(8, 3))
    assert not torch.equal(model.state_dict()["0.running_mean"], before["0.running_mean"])
    assert has_changed()
    snapshot.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(layer, NetReplacingItsBuffer) or not has_changed()


@pytest.mark.parametrize("newer", [True, False], ids=["numpy 1.24 and newer", "numpy 1.23"])
def test_r03_draws_follow_from_the_key_alone(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    if not newer:  # which has no such functions
        monkeypatch.delattr("numpy.random.mtrand.get_bit_generator", raising=False)
        monkeypatch.delattr("numpy.random.mtrand.set_bit_generator", raising=False)

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    kept = rng_state()
    plain = draw()
    kind, words, *rest = kept["numpy"]
    version, numbers, *others = kept["python"]
    older = {"numpy": (kind, words.tolist(), *rest), "python": (version, tuple(numbers.tolist()), *others)}
    for form in (kept, {**kept, **older}):  # the latter stands in older checkpoints
        set_rng_state(form)
        assert draw() == plain
    set_rng_state(kept)
    drawn = []
    for key in [(1, 0, 2), (1, 0, 2), (1, 0, 3)]:
        with seeded_rng(*key):
            drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
    assert draw() == plain


def test_a_seeded_block_inside_of_another_one_leaves_its_numbers_as_they_were() -> None:
    drawn = []
    for nested in (False, True):
        with seeded_rng(1):
            with seeded_rng(2) if nested else nullcontext():
                np.random.rand() if nested else None
            drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))
    assert drawn[0] == drawn[1]


def test_nothing_is_collected_while_torch_holds_its_generators_lock() -> None:
    """A garbage collection there may release a thread that wants that lock: the process would deadlock."""
    collecting: set[str] = set()

    def record_collection(phase: str, info: dict[str, Any]) -> None:
        collecting.add(sys._getframe(1).f_code.co_name)

    thresholds = gc.get_threshold()
    gc.callbacks.append(record_collection)
    gc.set_threshold(1)
    try:
        for _ in range(10):
            rng_state()
            with seeded_rng(1):
                torch.ones(1)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(record_collection)
    assert collecting  # elsewhere
    assert torch.get_rng_state.__name__ not in collecting
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([nn.BatchNorm1d(3)], r"1 \(BatchNorm1d"),
        ([nn.Dropout(0.1)], r"1 \(Dropout"),
        ([nn.LSTM(3, 3, 2, dropout=0.2)], r"1 \(LSTM"),
        ([nn.MultiheadAttention(4, 2, dropout=0.2)], r"1 \(MultiheadAttention"),
        ([nn.RReLU()], r"1 \(RReLU"),
        ([nn.Dropout() for _ in range(5)], "2 more"),
        ([nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.Dropout(0.0), nn.LSTM(3, 3)], None),
        ([nn.SyncBatchNorm(3), nn.BatchNorm1d(3).eval()], None),
    ],
)
def test_r09_layers_that_couple_rows_or_draw_are_named(layers: list[nn.Module], named: str | None) -> None:
    sentence = describe_world_dependence(nn.Sequential(nn.Linear(3, 3), *layers))
    assert sentence is None if named is None else re.search(named, str(sentence))
