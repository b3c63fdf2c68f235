"""What is refused before anything is sent, and what several arrays become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastic_collectives.operands import (
    as_reduction,
    as_rows,
    divide_evenly,
    fuse_reductions,
    signature,
    validate_splits,
)

PLAIN: dict[str, Any] = {"op": "sum", "dtype": None, "weight": None, "scale": (1.0, 1.0), "compression": None}


@pytest.mark.parametrize(
    ("array", "arguments", "words"),
    [
        (np.zeros(3, np.complex64), {}, "complex64"),
        (np.zeros(3, ">f4"), {}, "native"),
        (np.zeros(3, np.int16), {"dtype": "bfloat16"}, "only uint16 holds bfloat16"),
        (np.zeros(3, np.uint16), {"dtype": "float16"}, "only uint16 holds bfloat16"),
        (np.zeros(3), {"op": "mean"}, "op must be"),
        (np.zeros(3, np.int32), {"op": "adasum"}, "adasum takes"),
        (np.zeros(3), {"weight": 1.0}, "weight is for averages"),
        (np.zeros(3, np.int32), {"op": "average", "weight": 1.0}, "weight is for averages"),
        (np.zeros(3), {"op": "average", "weight": -1.0}, "weight must be"),
        (np.zeros(3), {"op": "average", "weight": float("nan")}, "weight must be"),
        (np.zeros(3), {"scale": (float("inf"), 1.0)}, "scale must be"),
        (np.zeros(3, bool), {"op": "average"}, "bool"),
        (np.zeros(3, bool), {"scale": (0.5, 1.0)}, "bool"),
        (np.zeros(3), {"compression": "fp16"}, "compression"),
        (np.zeros(3, np.float32), {"compression": "int8"}, "compression"),
        (np.zeros(3, np.float32), {"compression": "fp16", "op": "adasum"}, "compression"),
    ],
)
def test_invalid_operands_are_refused(array: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_reduction(array, **{**PLAIN, **arguments})


def test_an_unaligned_array_is_refused() -> None:
    with pytest.raises(ValueError, match="aligned"):
        as_reduction(np.frombuffer(bytearray(17), np.float32, 4, offset=1), **PLAIN)


def test_rows_are_cut_evenly_and_splits_are_checked() -> None:
    assert divide_evenly(7, 3) == [3, 2, 2]
    assert divide_evenly(0, 2) == [0, 0]
    assert validate_splits(6, None, 3) == [2, 2, 2]
    assert validate_splits(3, [0, 3], 2) == [0, 3]
    for splits in (None, [1], [1, 1], [-1, 4]):
        with pytest.raises(ValueError, match="splits"):
            validate_splits(3, splits, 2)
    with pytest.raises(ValueError, match="scalar"):
        as_rows(np.array(1.0))


def test_arrays_of_a_kind_are_fused_and_filled_from_the_result() -> None:
    arrays = [
        np.ones((2, 2), np.float32),
        np.ones(3, np.int64),
        np.full(1, 5, np.float32),
        np.zeros(0, np.int64),
    ]
    seen = []
    for whole in fuse_reductions([as_reduction(array, **PLAIN) for array in arrays]):
        seen.append((whole.dtype, whole.array.tolist(), whole.shapes))
        np.multiply(whole.array, 2, out=whole.array)
    assert seen == [("float32", [1, 1, 1, 1, 5], ((2, 2), (1,))), ("int64", [1, 1, 1], ((3,), (0,)))]
    assert [array.tolist() for array in arrays] == [[[2, 2], [2, 2]], [2, 2, 2], [10], []]


def test_adasum_is_never_fused() -> None:
    arrays = [np.ones(2), np.ones(3)]
    whole = list(fuse_reductions([as_reduction(array, **{**PLAIN, "op": "adasum"}) for array in arrays]))
    assert [reduction.array.size for reduction in whole] == [2, 3]


def test_a_signature_is_the_same_in_every_process() -> None:
    assert signature((3, 2)) == 0xCBAAA6F7
    assert len({signature((3, 2)), signature((2, 3)), signature((6,)), signature((3, 2), (1,))}) == 4
