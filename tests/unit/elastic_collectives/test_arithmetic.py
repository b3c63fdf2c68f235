"""The yardstick itself, against values worked out by hand and against other ways to compute them."""

from __future__ import annotations

import numpy as np
import pytest

from elastic_collectives.operands import apply_scale, narrow, widen
from tests.reductions import reduce_parts, scale_and_divide


def test_bfloat16_is_the_upper_half_of_float32_rounded_to_even() -> None:
    values = np.array([1.0, -2.5, 3.0e38, 0.0, np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4028235e38], np.float32)
    expected = [0x3F80, 0xC020, 0x7F62, 0, 0x7F80, 0x3F80, 0x3F82, 0x7F80]
    assert narrow(values, "bfloat16").tolist() == expected
    assert widen(np.array([0x3F81], np.uint16), "bfloat16").tolist() == [1 + 2**-7]
    assert np.isnan(widen(narrow(np.array([np.nan], np.float32), "bfloat16"), "bfloat16")).all()


def test_sixteen_bit_sums_are_rounded_once() -> None:
    parts = [np.array([2048.0], np.float16), *[np.array([1.0], np.float16)] * 4]
    assert reduce_parts(parts, "float16", "sum", 1.0).tolist() == [
        2052.0
    ]  # 2048 + 1 alone would be 2048 each time
    assert reduce_parts(parts, "float16", "average", 1.0).tolist() == [np.float16(2052 / 5)]


def test_integer_averages_round_towards_zero_and_stay_in_range() -> None:
    assert scale_and_divide(np.array([-7, 7, -3], np.int64), 1.0, 2).tolist() == [-3, 3, -1]
    assert apply_scale(np.array([2**62 + 1], np.int64), 1.0).tolist() == [2**62 + 1]
    assert apply_scale(np.array([100, -100, 3], np.int8), 2.5).tolist() == [127, -128, 7]


def test_the_sum_of_bools_is_or_and_their_product_is_and() -> None:
    parts = [np.array([True, True, False]), np.array([True, False, False])]
    found = {op: reduce_parts(parts, "bool", op, 1.0).tolist() for op in ("sum", "max", "min", "product")}
    assert found["sum"] == found["max"] == [True, True, False]
    assert found["min"] == found["product"] == [True, False, False]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_adasum_is_the_mean_of_equal_and_the_sum_of_orthogonal_vectors(count: int) -> None:
    same = [np.array([1.0, 2.0, 3.0])] * count
    assert np.allclose(reduce_parts(same, "float64", "adasum", 1.0), same[0])
    assert np.allclose(reduce_parts(list(np.eye(count)), "float64", "adasum", 1.0), np.ones(count))


def test_adasum_of_three_combines_the_first_with_the_last_before_the_second() -> None:
    a, b, c = (np.array(v) for v in ([1.0, 0.0], [1.0, 1.0], [2.0, 0.0]))
    first = a * (1 - 2 / 2) + c * (1 - 2 / 8)  # (1.5, 0)
    expected = first * (1 - 1.5 / 4.5) + b * (1 - 1.5 / 4)
    assert np.allclose(reduce_parts([a, b, c], "float64", "adasum", 1.0), expected)
    assert reduce_parts([np.zeros(2), b], "float64", "adasum", 1.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("over", "signed", "unsigned"), [(128, [0, -1], 1), (130, [0, 0], 1), (256, [0, 0], 0)]
)
def test_averages_of_small_integers_do_not_overflow_in_large_worlds(
    over: int, signed: list[int], unsigned: int
) -> None:
    """As the engine's, whatever the world's size and the type's range."""
    assert scale_and_divide(np.array([127, -128], np.int8), 1.0, over).tolist() == signed
    assert scale_and_divide(np.array([255], np.uint8), 1.0, over).tolist() == [unsigned]
    assert scale_and_divide(np.array([2**64 - 1], np.uint64), 1.0, over).tolist() == [(2**64 - 1) // over]
