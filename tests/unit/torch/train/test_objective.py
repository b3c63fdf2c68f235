"""What a loss is given of a model's output, and what is kept of it for metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from spark_elastic.torch.train.objective import ModelLoss
from spark_elastic.training.share import Share

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
PART = Share(4, np.arange(4), (X,), (torch.zeros(4),), None)


class Pair(NamedTuple):
    far: torch.Tensor
    near: torch.Tensor


class Returning(torch.nn.Module):
    def __init__(self, structure: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.structure = torch.nn.Linear(3, 1), structure

    def forward(self, x: torch.Tensor) -> Any:
        far = self.layer(x)[:, 0]
        return self.structure(far, far / 2)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(
    ("structure", "far"),
    [
        (lambda far, near: (far, near), lambda output: output[0]),
        (Pair, lambda output: output.far),
        (lambda far, near: {"far": far, "near": near}, lambda output: output["far"]),
    ],
)
def test_a_loss_sees_the_structure_that_the_model_returns(
    structure: Any, far: Callable[[Any], torch.Tensor], precision: str | None
) -> None:
    """In float32, whatever the forward pass was computed in; metrics are of each member."""
    seen: list[torch.Tensor] = []

    def loss(output: Any, label: torch.Tensor) -> torch.Tensor:
        seen.append(far(output))
        return (seen[-1] - label) ** 2

    scored = ModelLoss(loss, weighted=False, precision=precision)(Returning(structure), PART)
    assert seen[0].dtype is torch.float32
    assert torch.equal(scored.outputs[0], seen[0])
    assert torch.equal(scored.outputs[1], seen[0] / 2)
