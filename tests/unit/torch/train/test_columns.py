"""Columns of a step as tensors: whose memory they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.loss import ModelLoss
from spark_elastic.training.torch.spec import BatchBuilder


def test_an_in_place_operation_on_a_feature_does_not_change_the_label() -> None:
    """An autoencoder that begins with an activation in place."""
    x = np.array([[-1.0, 2.0]], np.float32)
    columns = BatchBuilder((Column("x", "float32", (2,)),), ("x",), None, torch.float32)
    share = columns.build(StepRows(0, 0, 1, np.arange(1), {"x": x}))
    torch.nn.functional.relu_(share.features[0])
    assert share.labels[0].tolist() == [[-1.0, 2.0]]


def test_numbers_that_int64_does_not_hold_are_refused() -> None:
    columns = BatchBuilder((Column("id", "uint64"),), (), None, torch.float32)

    def build(number: int) -> list[int]:
        rows = StepRows(0, 0, 1, np.arange(1), {"id": np.array([number], np.uint64)})
        found: list[int] = columns.build(rows).features[0].tolist()
        return found

    assert build(2**63 - 1) == [2**63 - 1]
    with pytest.raises(
        InvalidInput, match="uint64 has 9223372036854775813, and the model's whole numbers are int64"
    ):
        build(2**63 + 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_model_of_16_bits_gets_labels_and_weights_of_32(dtype: torch.dtype) -> None:
    """Else class 257 would be class 256, and a step's weights would not be read."""
    columns = BatchBuilder((Column("x", "float64"),), ("y",), "w", dtype)
    arrays = {"x": np.array([0.5, 1.5]), "y": np.array([257.0, 1001.0]), "w": np.array([0, 3])}
    share = columns.build(StepRows(0, 0, 2, np.arange(2), arrays))
    assert share.weights is not None
    assert (share.features[0].dtype, share.has_weight) == (dtype, True)
    for tensor in (share.labels[0], share.weights):
        assert tensor.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert share.labels[0].tolist() == [257.0, 1001.0]


@pytest.mark.parametrize("loss", [torch.nn.functional.huber_loss, torch.nn.functional.mse_loss])
def test_a_loss_of_the_user_s_gets_outputs_and_labels_of_one_type_from_a_model_of_16_bits(loss: Any) -> None:
    model = torch.nn.Linear(1, 1).bfloat16()
    columns = BatchBuilder((Column("x", "float64", (1,)),), ("y",), None, torch.bfloat16)
    arrays = {"x": np.array([[0.5], [1.5]]), "y": np.array([257.0, 1001.0])}
    part = columns.build(StepRows(0, 0, 2, np.arange(2), arrays))
    found = ModelLoss(lambda output, label: loss(output[:, 0], label, reduction="none"), False)(model, part)
    found.total.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16
