"""A store in memory that belongs to whoever opened it; fsspec's own is shared by the whole process. Any thread."""

from __future__ import annotations

from fsspec.implementations.memory import MemoryFileSystem

from spark_elastic.data.store import Store


class _Memory(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, object] = {}
        self.pseudo_dirs = [""]


def memory_store() -> Store:
    """An empty one."""
    return Store("memory://private", _Memory(), "")
