"""A model's forward passes."""

from __future__ import annotations

import gc
import random
import re
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.training.torch.buffers import (
    BufferSnapshot,
    describe_world_dependence,
    rng_state,
    set_rng_state,
)


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
def test_r03_draws_follow_from_the_key_and_leave_the_generators_alone(
    monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    if not newer:  # which has no such functions
        monkeypatch.delattr("numpy.random.mtrand.get_bit_generator", raising=False)
        monkeypatch.delattr("numpy.random.mtrand.set_bit_generator", raising=False)

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    kept = rng_state()
    plain = draw()
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
