"""A store in memory, private to its test."""

from __future__ import annotations

from fsspec.implementations.memory import MemoryFileSystem

from spark_elastic.data.store import Store


class _PrivateMemory(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, object] = {}
        self.pseudo_dirs = [""]


def make_memory_store() -> Store:
    """A new, empty store; fsspec's own is shared by the whole process."""
    return Store("memory://private", _PrivateMemory(), "")
