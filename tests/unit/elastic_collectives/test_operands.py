"""What is refused before anything is sent, what several arrays become; errors; and the yardstick of these tests."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from elastic_collectives import CollectiveError, PeerLost
from elastic_collectives.operands import (
    apply_scale,
    as_reduction,
    as_rows,
    divide_evenly,
    fuse_reductions,
    narrow,
    signature,
    validate_splits,
    widen,
)
from tests.reductions import reduce_parts, scale_and_divide

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
    kinds = np.float32, np.int64
    arrays = [np.ones((2, 2), kinds[0]), np.ones(3, kinds[1]), np.full(1, 5, kinds[0]), np.zeros(0, kinds[1])]
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


def test_bfloat16_is_the_upper_half_of_float32_rounded_to_even() -> None:
    values = np.array([1.0, -2.5, 3.0e38, 0.0, np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4028235e38], np.float32)
    expected = [0x3F80, 0xC020, 0x7F62, 0, 0x7F80, 0x3F80, 0x3F82, 0x7F80]
    assert narrow(values, "bfloat16").tolist() == expected
    assert widen(np.array([0x3F81], np.uint16), "bfloat16").tolist() == [1 + 2**-7]
    assert np.isnan(widen(narrow(np.array([np.nan], np.float32), "bfloat16"), "bfloat16")).all()


def test_sixteen_bit_sums_are_rounded_once() -> None:
    parts = [np.array([2048.0], np.float16), *[np.array([1.0], np.float16)] * 4]
    # 2048 + 1 alone would be 2048 each time.
    assert reduce_parts(parts, "float16", "sum", 1.0).tolist() == [2052.0]
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


@pytest.mark.parametrize(
    ("error", "ranks", "reason"),
    [
        (PeerLost([1, 2], "they are gone"), (1, 2), "they are gone"),
        (CollectiveError("injected"), (), "injected"),
        (CollectiveError(OSError("a broken pipe")), (), "a broken pipe"),
        (CollectiveError(), (), ""),
    ],
)
def test_a_collective_error_has_ranks_and_a_reason_or_one_message(
    error: CollectiveError, ranks: tuple[int, ...], reason: str
) -> None:
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (type(one), one.ranks, one.reason, str(one)) == (type(error), ranks, reason, reason)


def test_errors_of_a_subgroup_name_ranks_of_the_whole_group() -> None:
    error = PeerLost([1], "rank 1 is gone")
    same = error.to_world_ranks(range(2))
    assert (same is error, type(same), same.ranks, same.reason) == (False, PeerLost, (1,), error.reason)
    told = error.to_world_ranks([2, 5])
    assert (type(told), told.ranks) == (PeerLost, (5,))
    assert told.reason == "rank 1 is gone (counted among ranks 2, 5)"
