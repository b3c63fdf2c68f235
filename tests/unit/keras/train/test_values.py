"""Values as JSON with arrays beside them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from spark_elastic.keras.train.state import is_plain, plain, restored


def test_what_goes_in_comes_out() -> None:
    given = {"a": [1, None, True, "x", 2.5], "b": {"c": np.arange(3.0)}, "d": np.float32(0.5), "e": (1, 2)}
    arrays: list[Any] = []
    found = restored(json.loads(json.dumps(plain(given, arrays))), arrays)
    assert (found["a"], found["d"], found["e"]) == (given["a"], 0.5, [1, 2])
    np.testing.assert_array_equal(found["b"]["c"], [0.0, 1.0, 2.0])


@pytest.mark.parametrize("value", [object(), {1: 2}, [len], {"a": {3}}])
def test_anything_else_is_no_plain_value(value: Any) -> None:
    assert not is_plain(value)
    with pytest.raises(TypeError, match="no plain value"):
        plain(value, [])
