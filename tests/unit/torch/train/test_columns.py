"""Columns of a step as tensors: whose memory they are."""

from __future__ import annotations

import numpy as np
import torch

from spark_elastic.data.loader import StepRows
from spark_elastic.data.manifest import Column
from spark_elastic.torch.train.spec import BatchBuilder


def test_an_in_place_operation_on_a_feature_does_not_change_the_label() -> None:
    """An autoencoder that begins with an activation in place."""
    x = np.array([[-1.0, 2.0]], np.float32)
    columns = BatchBuilder((Column("x", "float32", (2,)),), ("x",), None, torch.float32)
    share = columns.build(StepRows(0, 0, 1, np.arange(1), {"x": x}))
    torch.nn.functional.relu_(share.features[0])
    assert share.labels[0].tolist() == [[-1.0, 2.0]]
