"""R3: what a forward pass changes comes back."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from spark_elastic.torch.snapshot import ForwardSnapshot


def test_r03_buffers_and_generators_come_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    x = torch.randn(8, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = ForwardSnapshot(model)
    first = (model(x), np.random.rand(), random.random())
    assert not torch.equal(model.state_dict()["0.running_mean"], before["0.running_mean"])
    assert snapshot.wrote("0.running_mean", model.get_buffer("0.running_mean"))
    snapshot.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not snapshot.wrote("0.running_mean", model.get_buffer("0.running_mean"))
    again = (model(x), np.random.rand(), random.random())
    assert torch.equal(first[0], again[0])
    assert first[1:] == again[1:]
