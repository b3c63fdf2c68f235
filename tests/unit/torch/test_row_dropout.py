"""Dropout drawn by rows: the same for a row whatever else is in its batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.torch import RowDropout, draw_rows
from spark_elastic.training.torch.buffers import describe_world_dependence


def drop_rows(rows: list[int], *words: int) -> torch.Tensor:
    layer = RowDropout(0.25)
    draw_rows(layer, np.array(rows), *words)
    out: torch.Tensor = layer(torch.ones(len(rows), 3, 50, dtype=torch.float64))
    return out


def test_r09_a_rows_mask_depends_on_the_row_and_the_words_alone() -> None:
    whole = drop_rows(list(range(40)), 1, 2)
    assert torch.equal(drop_rows([7, 3], 1, 2), whole[[7, 3]])
    assert not torch.equal(drop_rows([7], 1, 3), whole[[7]])
    assert set(whole.unique().tolist()) == {0.0, 1 / 0.75}
    assert float((whole == 0).double().mean()) == pytest.approx(0.25, abs=0.02)


def test_two_layers_draw_differently_and_gradients_follow_the_mask() -> None:
    net = torch.nn.Sequential(RowDropout(0.5), RowDropout(0.5))
    draw_rows(net, np.arange(50), 1)
    x = torch.ones(50, 8, requires_grad=True)
    net(x).sum().backward()
    assert x.grad is not None
    assert float((x.grad == 4).float().mean()) == pytest.approx(0.25, abs=0.1)


def test_row_dropout_needs_rows_in_training_and_does_nothing_outside_of_it() -> None:
    layer, x = RowDropout(0.5), torch.ones(2, 3)
    with pytest.raises(InvalidInput, match=r"got 2 rows, draw_rows\(\) was called for none"):
        layer(x)
    draw_rows(layer, np.arange(3), 1)
    with pytest.raises(InvalidInput, match=r"draw_rows\(\) was called for 3"):
        layer(x)
    assert torch.equal(layer.eval()(x), x)
    with pytest.raises(InvalidInput, match="without 1"):
        RowDropout(1.0)
    assert describe_world_dependence(torch.nn.Sequential(RowDropout(0.5))) is None
