"""Values as JSON with arrays beside them, and columns as a model's inputs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spark_elastic.data.manifest import Column
from spark_elastic.protocol.types import START
from spark_elastic.runs.snapshot import SnapshotBuilder, build_snapshot
from spark_elastic.training.keras.batching import Inputs
from spark_elastic.training.keras.state import from_json_tree, is_plain, to_json_tree


def test_plain_values_survive_a_round_trip() -> None:
    given = {"a": [1, None, True, "x", 2.5], "b": {"c": np.arange(3.0)}, "d": np.float32(0.5), "e": (1, 2)}
    given["by epoch"] = {0: 0.5, np.int64(1): {"last": np.float32(0.25)}}
    snapshot = build_snapshot(START, lambda builder: to_json_tree(given, builder))
    found = from_json_tree(json.loads(json.dumps(snapshot.values)), snapshot.memory)
    assert (found["a"], found["d"], found["e"]) == (given["a"], 0.5, [1, 2])
    assert found["by epoch"] == {0: 0.5, 1: {"last": 0.25}}
    np.testing.assert_array_equal(found["b"]["c"], [0.0, 1.0, 2.0])


@pytest.mark.parametrize("value", [object(), {(1, 2): 2}, [len], {"a": {3}}, np.array([object()])])
def test_other_values_are_refused(value: Any) -> None:
    assert not is_plain(value)
    with pytest.raises(TypeError, match="no plain value"):
        to_json_tree(value, SnapshotBuilder())


def test_a_custom_class_of_inputs_gets_the_result_of_the_transformation() -> None:
    columns = (Column("image", "object"), Column("n", "int32", (4,)))
    inputs = Inputs.of(SimpleNamespace(), columns, free=True)
    made = {"image": np.array([[0.25, 0.5]]), "n": np.array([[1, 2]], "int32")}
    image, numbers = inputs.arrays(made)
    assert (image.dtype, image.tolist()) == (np.dtype("float32"), [[0.25, 0.5]])
    assert (numbers.dtype, numbers.tolist()) == (np.dtype("int64"), [[1, 2]])
