"""R9: layers that make weights depend on the world are named, others are not."""

from __future__ import annotations

import re

import pytest
from torch import nn

from spark_elastic.training.torch.forward import describe_world_dependence


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.BatchNorm1d(3), r"1 \(BatchNorm1d"),
        (nn.Dropout(0.1), r"1 \(Dropout"),
        (nn.LSTM(3, 3, 2, dropout=0.2), r"1 \(LSTM"),
        (nn.MultiheadAttention(4, 2, dropout=0.2), r"1 \(MultiheadAttention"),
        (nn.RReLU(), r"1 \(RReLU"),
    ],
)
def test_r09_layers_that_couple_rows_or_draw_are_named(layer: nn.Module, named: str) -> None:
    sentence = describe_world_dependence(nn.Sequential(nn.Linear(3, 3), layer))
    assert sentence is not None
    assert re.search(named, sentence)


def test_r09_layers_that_do_not_couple_rows_are_not_named() -> None:
    still = nn.BatchNorm1d(3).eval()
    layers = (
        nn.Linear(3, 3),
        nn.LayerNorm(3),
        nn.GroupNorm(1, 3),
        nn.Dropout(0.0),
        nn.LSTM(3, 3),
        nn.SyncBatchNorm(3),
    )
    assert describe_world_dependence(nn.Sequential(*layers, still)) is None


def test_r09_many_layers_are_counted() -> None:
    sentence = describe_world_dependence(nn.Sequential(*(nn.Dropout() for _ in range(5))))
    assert sentence is not None
    assert "2 more" in sentence
