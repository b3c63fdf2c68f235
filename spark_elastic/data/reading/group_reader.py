"""What readers have in common: which columns, the decoded row groups that they keep, opening and closing.

Knows no format. Any thread may fetch; one decodes at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reading.decoded_groups import DEFAULT_CACHE_BYTES, DecodedGroups
from spark_elastic.data.reading.reader import Decoded
from spark_elastic.data.store import Store

T = TypeVar("T", bound="GroupReader")


class GroupReader(ABC):
    """Reads `columns` (all, if none are named) of a data set that a manifest describes."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._store = store
        self._manifest = manifest
        names = [column.name for column in manifest.columns] if columns is None else columns
        self.columns: tuple[Column, ...] = tuple(manifest.column(name) for name in dict.fromkeys(names))
        self._groups = DecodedGroups(cache_bytes)

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fetch(self, group: int) -> Decoded:
        """Column -> read-only array (rows, *shape) of a row group."""
        return self._groups.fetch(group, self._decode)

    def prefetch(self, group: int) -> bool:
        """Decode it now; False if there is no room for it."""
        return self._groups.prefetch(group, self._decode)

    def release(self, group: int | None = None) -> None:
        """It is the next to be forgotten; all are where it is None."""
        self._groups.release(group)

    def close(self) -> None:
        """Let everything go; waits for a decoding thread."""
        self._groups.close(self._let_go)

    @abstractmethod
    def _decode(self, group: int) -> Decoded:
        """See `reader.Reader.fetch` for what it raises."""

    @abstractmethod
    def _let_go(self) -> None:
        """Close what is open."""
