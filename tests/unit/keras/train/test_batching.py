"""Columns as a model's inputs: what the user's function returns is taken as it is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("keras")

from spark_elastic.data.manifest import Column
from spark_elastic.training.keras.batching import Inputs


def test_a_custom_class_of_inputs_gets_the_result_of_the_transformation() -> None:
    columns = (Column("image", "object"), Column("n", "int32", (4,)))
    inputs = Inputs.of(SimpleNamespace(), columns, free=True)
    made = {"image": np.array([[0.25, 0.5]]), "n": np.array([[1, 2]], "int32")}
    image, numbers = inputs.arrays(made)
    assert (image.dtype, image.tolist()) == (np.dtype("float32"), [[0.25, 0.5]])
    assert (numbers.dtype, numbers.tolist()) == (np.dtype("int64"), [[1, 2]])
