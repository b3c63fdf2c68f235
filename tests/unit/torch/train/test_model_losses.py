"""What a loss is given of a model's output, what is kept of it for metrics, and how losses add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from elastic_collectives import MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import START
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.loss import DtypeHints, ModelLoss, MultiOutputLoss
from tests.fake_group import FakeFabric

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
PART = LocalBatch(4, np.arange(4), (X,), (torch.zeros(4),), None)


class Pair(NamedTuple):
    far: torch.Tensor
    near: torch.Tensor


class NetReturning(torch.nn.Module):
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
def test_a_loss_gets_the_structure_that_the_model_returns(
    structure: Any, far: Callable[[Any], torch.Tensor], precision: str | None
) -> None:
    """In float32, whatever the forward pass was computed in; metrics are of each member."""
    seen: list[torch.Tensor] = []

    def loss(output: Any, label: torch.Tensor) -> torch.Tensor:
        seen.append(far(output))
        return (seen[-1] - label) ** 2

    scored = ModelLoss(loss, weighted=False, precision=precision)(NetReturning(structure), PART)
    assert seen[0].dtype is torch.float32
    assert torch.equal(scored.outputs[0], seen[0])
    assert torch.equal(scored.outputs[1], seen[0] / 2)


def test_outputs_by_name_are_labels_in_order() -> None:
    model = NetReturning(lambda far, near: {"far": far, "near": near})
    share = LocalBatch(4, np.arange(4), (X,), (torch.zeros(4), torch.ones(4)), None)

    def score(*labels: str) -> Any:
        losses = MultiOutputLoss({label: (torch.nn.MSELoss(), 1.0) for label in labels}, weighted=False)
        losses.begin(FakeFabric(1).group(0), share, START)
        return losses(model, share)

    def score_means(*labels: str) -> dict[str, float]:
        return {name: total / divisor for name, (total, divisor) in score(*labels).logged.items()}

    logged = score_means("far", "near")
    far = model(X)["far"].detach()
    assert logged == pytest.approx(
        {"loss_far": float((far**2).mean()), "loss_near": float(((far / 2 - 1) ** 2).mean())}
    )
    assert score_means("a", "b")["loss_a"] == pytest.approx(logged["loss_far"])
    with pytest.raises(InvalidInput, match="the model returns far, near, and label_cols names near, far"):
        score("near", "far")
    model.structure = lambda far, near: {"far": far}
    with pytest.raises(InvalidInput, match="loss has 2 losses, but the model returned 1"):
        score("far", "near")


@pytest.mark.parametrize("at_once", [6, 4, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_r08_the_loss_of_each_output_does_not_depend_on_how_the_rows_are_split(
    at_once: int, reduction: str
) -> None:
    """Class weights and row weights: each row counts for something else."""
    x, y = torch.arange(18.0).reshape(6, 3).sin(), torch.tensor([0, 0, 1, 2, 2, 1])
    weights = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 5.0])
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5]), reduction=reduction)
    share = LocalBatch(6, np.arange(6), (x,), (y, x[:, :1]), weights)
    model: Any = lambda x: (x, x[:, :1])  # noqa: E731 - stands for a module
    losses = MultiOutputLoss({"y": (loss, 1.0), "w": (torch.nn.MSELoss(), 0.5)}, weighted=True)
    losses.begin(FakeFabric(1).group(0), share, START)
    parts = [(part, losses(model, part)) for part in share.micro_batches(at_once)]
    logged = [scored.logged["loss_y"] for _, scored in parts]
    told = sum(total for total, _ in logged) / sum(divisor for _, divisor in logged)

    by_row = torch.nn.functional.cross_entropy(x, y, loss.weight, reduction="none") * weights
    divisor = (loss.weight[y] * weights).sum() if reduction == "mean" else 1.0
    assert told == pytest.approx(float(by_row.sum() / divisor), rel=1e-6)
    assert sum(float(scored.total) for _, scored in parts) / len(share) == pytest.approx(told, rel=1e-6)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (torch.nn.Linear(3, 1), torch.int64),
        (torch.nn.LSTM(3, 1), torch.int64),
        (torch.nn.BatchNorm1d(3), torch.int64),
        (torch.nn.LayerNorm(3), torch.bool),
        (torch.nn.Embedding(3, 1), torch.float32),
    ],
)
def test_a_layer_that_takes_another_number_type_is_named_with_the_columns(
    layer: torch.nn.Module, kind: torch.dtype
) -> None:
    whole = LocalBatch(4, np.arange(4), (torch.ones(4, 3).to(kind),), (torch.zeros(4),), None)
    loss = ModelLoss(torch.nn.MSELoss(), weighted=False)
    for transformed, advice in (
        (False, "cast the column in Spark"),
        (True, "return it from transformation_fn"),
    ):
        with pytest.raises(
            InvalidInput, match=rf"given 'n' as {kind}, 'y' as torch.float32: {advice}.* \(float32, or int64"
        ):
            DtypeHints(loss, ["n", "y"], transformed)(layer, whole)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the loss is out of order"),
        InvalidInput("of that dtype"),
        MismatchError([1], "another dtype than rank 1"),
        ValueError("found invalid values: tensor([nan], dtype=torch.float64)"),  # of torch.distributions
    ],
)
def test_other_errors_of_the_loss_are_passed_on(error: Exception) -> None:
    def raise_error(output: Any, label: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        DtypeHints(ModelLoss(raise_error, weighted=False), ["x", "y"])(torch.nn.Linear(3, 1), PART)
    assert caught.value is error
