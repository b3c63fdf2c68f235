"""Spark's `xxhash64`, computed for columns of Arrow: many rows at a time, each with a seed of its own.

The hash of one value is the seed of the next. A number is hashed as its 4 or 8 bytes, an array as its values one after
the other. Knows no nulls. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Hasher = Callable[[Hashes, Numbers], Hashes]  # takes for each row a seed, and the place of a value

SEED = np.uint64(42)  # of the first value
_P1, _P2, _P3, _P4, _P5 = np.array(
    [0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5],
    np.uint64,
)
_STRIPE = 32  # bytes that are mixed together in long strings
_BLOCK = 1 << 15  # rows that stay in the processor's cache while all of their columns are hashed


def normalize(values: pa.Array) -> pa.Array:
    """The same values, with 0.0 for -0.0 and one NaN for all."""
    if pa.types.is_list(values.type):
        return pa.ListArray.from_arrays(values.offsets, normalize(values.values), type=values.type)
    if not pa.types.is_floating(values.type):
        return values
    numbers = values.to_numpy(zero_copy_only=False) + values.type.to_pandas_dtype()(0)
    return pa.array(np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers))


class CopyHasher:
    """A hash of numbered copies of rows: the first of `add_hashes`, or its exact one, with the number before a row's
    columns."""

    def __init__(self, columns: Sequence[pa.Array], exact: bool) -> None:
        """columns: of the rows, normalized, without nulls."""
        self._hashers = [make_hasher(each, rounds=not exact) for each in columns]
        self._seed = SEED
        if exact:
            (self._seed,) = make_hasher(pa.array([1], pa.int32()))(np.array([SEED]), np.array([0]))

    def hash(self, copies: Numbers, places: Numbers) -> Hashes:
        """Of copies of the rows at those places."""
        hashes = np.empty(len(copies), np.uint64)
        for begin in range(0, len(copies), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            at = places[block]
            mixed = make_hasher(pa.array(copies[block]))(np.full(len(at), self._seed), np.arange(len(at)))
            for hash_column in self._hashers:
                mixed = hash_column(mixed, at)
            hashes[block] = mixed
        return hashes


def hash_further(hashes: Hashes, flag: bool) -> Hashes:
    """The hashes of the same rows with one more value behind them."""
    return make_hasher(pa.array([int(flag)], pa.int32()))(hashes, np.zeros(len(hashes), np.int64))


def make_hasher(values: pa.Array, rounds: bool = False) -> Hasher:
    """Hashes some of the values, which are normalized. rounds: float64 to float32."""
    levels = []
    while pa.types.is_list(values.type):
        levels.append(values.offsets.to_numpy())
        values = values.values
    if rounds and pa.types.is_float64(values.type):
        values = normalize(values.cast(pa.float32(), safe=False))  # small numbers become -0.0
    hash_one = _make_hasher(values)

    def hash_lists(seeds: Hashes, places: Numbers) -> Hashes:
        begin, end, seeds = places, places + 1, seeds.copy()
        for offsets in levels:
            begin, end = offsets[begin], offsets[end]
        lengths = end - begin
        for number in range(lengths.max(initial=0)):
            chosen = np.flatnonzero(lengths > number)
            seeds[chosen] = hash_one(seeds[chosen], begin[chosen] + number)
        return seeds

    return hash_lists if levels else hash_one


def _make_hasher(values: pa.Array) -> Hasher:
    if not pa.types.is_primitive(values.type):
        strings = values.cast(pa.large_binary())
        _, offsets, content = strings.buffers()
        bounds = np.frombuffer(offsets, np.int64)[strings.offset :]
        data = np.frombuffer(content or b"", np.uint8)
        return lambda seeds, at: _hash_bytes(seeds, data, bounds[at], bounds[at + 1] - bounds[at])
    size = 8 if values.type.bit_width == 64 else 4
    integers = pa.int64() if size == 8 else pa.int32()
    numbers = values.view(integers) if values.type.bit_width >= 32 else values.cast(integers)
    words = numbers.to_numpy().view(f"u{size}").astype(np.uint64)
    return lambda seeds, at: _finish(_mix(seeds + _P5 + np.uint64(size), words[at], size))


def _hash_bytes(seeds: Hashes, data: npt.NDArray[np.uint8], begin: Numbers, length: Numbers) -> Hashes:
    def load(at: Numbers, size: int) -> Hashes:
        parts = (data[at + byte].astype(np.uint64) << np.uint64(8 * byte) for byte in range(size))
        return sum(parts, np.zeros(len(at), np.uint64))

    hashes, stripes = seeds + _P5, length // _STRIPE
    if len(long := np.flatnonzero(stripes)):
        lanes = [seeds[long] + _P1 + _P2, seeds[long] + _P2, seeds[long], seeds[long] - _P1]
        for number in range(stripes.max()):
            chosen = np.flatnonzero(stripes[long] > number)
            for place, lane in enumerate(lanes):
                word = load(begin[long[chosen]] + number * _STRIPE + 8 * place, 8)
                lane[chosen] = _rotate(lane[chosen] + word * _P2, 31) * _P1
        mixed = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            mixed = (mixed ^ _rotate(lane * _P2, 31) * _P1) * _P1 + _P4
        hashes[long] = mixed
    hashes += length.astype(np.uint64)
    at = begin + stripes * _STRIPE
    for size in (8, 8, 8, 4, 1, 1, 1):
        chosen = np.flatnonzero(begin + length - at >= size)
        hashes[chosen] = _mix(hashes[chosen], load(at[chosen], size), size)
        at[chosen] += size
    return _finish(hashes)


def _mix(hashes: Hashes, words: Hashes, size: int) -> Hashes:
    mixed: Hashes
    if size == 8:
        mixed = _rotate(hashes ^ _rotate(words * _P2, 31) * _P1, 27) * _P1 + _P4
    elif size == 4:
        mixed = _rotate(hashes ^ words * _P1, 23) * _P2 + _P3
    else:
        mixed = _rotate(hashes ^ words * _P5, 11) * _P1
    return mixed


def _rotate(hashes: Hashes, bits: int) -> Hashes:
    return hashes << np.uint64(bits) | hashes >> np.uint64(64 - bits)


def _finish(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ hashes >> np.uint64(33)) * _P2
    hashes = (hashes ^ hashes >> np.uint64(29)) * _P3
    return hashes ^ hashes >> np.uint64(32)
