"""Columns of a step as tensors: whose memory they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.torch.train.spec import BatchBuilder


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
