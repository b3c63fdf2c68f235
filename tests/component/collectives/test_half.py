"""The native 16-bit conversions against numpy and against their own portable form, for every pattern of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastic_collectives import _engine
from elastic_collectives.operands import narrow, widen

HALVES = ("float16", "bfloat16")
ALL = np.arange(1 << 16, dtype=np.uint16)


def _widen(half: str, data: Any, portably: bool) -> Any:
    out = np.empty(data.size, np.float32)
    _engine.widen(getattr(_engine.DataType, half), data, out, portably)
    return out


def _narrow(half: str, data: Any, portably: bool) -> Any:
    out = np.empty(data.size, np.uint16)
    _engine.narrow(getattr(_engine.DataType, half), data, out, portably)
    return out


def _floats() -> Any:
    """Random bits of float32, all halves, and what lies on and beside every midpoint of two of them."""
    random = np.random.default_rng(5).integers(0, 1 << 32, 1 << 18, np.uint64).astype(np.uint32)
    halves = ALL[:0x7C00].view(np.float16).astype(np.float32)
    middles = ((halves + np.append(halves[1:], np.float32(65536))) / 2).view(np.uint32)
    middles = np.concatenate([middles, ALL.astype(np.uint32) << 16 | 0x8000])
    bits = np.concatenate([random, halves.view(np.uint32), middles - 1, middles, middles + 1])
    return np.concatenate([bits, bits ^ 0x80000000]).view(np.float32)


@pytest.mark.parametrize("half", HALVES)
def test_widening_16_bit_floats_agrees_with_numpy_with_and_without_simd(half: str) -> None:
    fast, portable = _widen(half, ALL, False), _widen(half, ALL, True)
    expected = widen(ALL.view(np.float16) if half == "float16" else ALL, half)
    assert np.array_equal(fast.view(np.uint32), portable.view(np.uint32))
    assert np.array_equal(np.isnan(fast), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert np.array_equal(fast[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("half", HALVES)
def test_narrowing_to_16_bits_rounds_to_nearest_even_with_and_without_simd(half: str) -> None:
    floats = _floats()
    fast, portable = _narrow(half, floats, False), _narrow(half, floats, True)
    assert np.array_equal(fast, portable)
    with np.errstate(invalid="ignore"):
        expected = narrow(floats, half).view(np.uint16)
    numbers = ~np.isnan(floats)
    assert np.array_equal(fast[numbers], expected[numbers])
    assert np.isnan(_widen(half, fast[~numbers], False)).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17])
def test_lengths_that_are_no_multiple_of_a_simd_vector_are_converted(half: str, count: int) -> None:
    floats = np.linspace(-3, 3, count, dtype=np.float32)
    assert np.array_equal(_narrow(half, floats, False), narrow(floats, half).view(np.uint16))
