"""An immutable mapping for the machines' states: an update costs about the square root of the size, not the size.

Updates go to a small overlay that is merged into the base once it has grown. Iteration order is that of a dict, so it
is the same in every run: it never depends on hashes.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from math import isqrt
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MIN_OVERLAY = 8


class Table(Mapping[K, V], Generic[K, V]):
    """`put` and `drop` return a changed copy and leave the original as it is."""

    __slots__ = ("_base", "_overlay", "_size")

    def __init__(self) -> None:
        self._base: dict[K, V] = {}
        self._overlay: dict[K, tuple[V] | None] = {}  # None: dropped
        self._size = 0

    def put(self, key: K, value: V) -> Table[K, V]:
        return self._copy_with(key, (value,), self._size + (key not in self))

    def drop(self, key: K) -> Table[K, V]:
        """Without `key`; the same table if it has no such key."""
        return self._copy_with(key, None, self._size - 1) if key in self else self

    def _copy_with(self, key: K, entry: tuple[V] | None, size: int) -> Table[K, V]:
        new: Table[K, V] = Table.__new__(Table)
        overlay = dict(self._overlay)
        overlay[key] = entry
        new._size = size
        if len(overlay) <= max(MIN_OVERLAY, isqrt(size)):
            new._base, new._overlay = self._base, overlay
        else:
            new._base, new._overlay = _merge(self._base, overlay), {}
        return new

    def __getitem__(self, key: K) -> V:
        if key in self._overlay:
            entry = self._overlay[key]
            if entry is None:
                raise KeyError(key)
            return entry[0]
        return self._base[key]

    def __contains__(self, key: object) -> bool:
        if key in self._overlay:
            return self._overlay[key] is not None
        return key in self._base

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Table({self._to_dict()})"

    # Copying all into a dict is ten times quicker than going through keys and `__getitem__`.

    def __iter__(self) -> Iterator[K]:
        return iter(self._to_dict())

    def values(self) -> ValuesView[V]:
        return self._to_dict().values()

    def items(self) -> ItemsView[K, V]:
        return self._to_dict().items()

    def _to_dict(self) -> dict[K, V]:
        return _merge(self._base, self._overlay) if self._overlay else self._base


def _merge(base: Mapping[K, V], overlay: Mapping[K, tuple[V] | None]) -> dict[K, V]:
    merged = dict(base)
    for key, entry in overlay.items():
        if entry is None:
            merged.pop(key, None)
        else:
            merged[key] = entry[0]
    return merged
