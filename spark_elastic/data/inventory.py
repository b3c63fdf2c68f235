"""What a store holds, data set by data set and run by run, and what of it may go.

Owns the store's folders: `data/FINGERPRINT`, `runs/RUN`, `probes/TOKEN`, `mail/JOB`. A run that has not ended can be
taken up again: neither it nor the rows that it reads are removed unasked (R19). Runs in the caller's thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from fsspec.implementations.memory import MemoryFileSystem

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError

_KINDS = {"data": "data", "runs": "run", "probes": "probe", "mail": "mail"}


@dataclass(frozen=True)
class Entry:
    """A folder of the store. kind: data, run, probe or mail. changed: of its newest object, seconds since 1970.

    needed: it is an unfinished run, or rows that one reads.
    """

    name: str
    kind: str
    bytes: int
    changed: float | None
    needed: bool


def entries(store: Store) -> list[Entry]:
    """Everything that this package wrote there, by name."""
    sizes: dict[str, int] = {}
    changed: dict[str, float | None] = {}
    runs: set[str] = set()
    ended: set[str] = set()
    for found in store.find():
        kind, _, rest = found.name.partition("/")
        if kind not in _KINDS or "/" not in rest:
            continue
        name = f"{kind}/{rest.partition('/')[0]}"
        sizes[name] = sizes.get(name, 0) + found.bytes
        ages = [each for each in (changed.get(name), found.changed) if each is not None]
        changed[name] = max(ages, default=None)
        if found.name == f"{name}/run.json":
            runs.add(name)
        if found.name == f"{name}/result.json":
            ended.add(name)
    unfinished = runs - ended
    needed = unfinished | {rows for run in unfinished for rows in _rows_of(store, run)}
    return [Entry(n, _KINDS[n.partition("/")[0]], sizes[n], changed[n], n in needed) for n in sorted(sizes)]


def clean(store: Store, older_than: float, now: float, unfinished: bool = False) -> list[Entry]:
    """Remove what was last written more than `older_than` seconds before `now`, and return it.

    unfinished: also runs that could be taken up again, and their rows. Where the store does not say when something was
    written, it stays.
    """
    if older_than < 0:
        raise InvalidInput(f"older_than is {older_than} seconds: it must not be negative.")
    old = [each for each in entries(store) if each.changed is not None and each.changed < now - older_than]
    gone = [each for each in old if unfinished or not each.needed]
    for each in gone:
        store.remove_tree(each.name)
    return gone


def _rows_of(store: Store, run: str) -> Iterator[str]:
    """Data sets outside of a run's own folder that it reads."""
    try:
        manifest = json.loads(json.loads(store.read_bytes(f"{run}/run.json"))["manifest"])
        files: list[str] = manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{run}/run.json in the store {store.url} is damaged: {error}") from error
    for name in files:
        parts = name.split("/")
        if parts[0] == "data" and len(parts) > 2:
            yield "/".join(parts[:2])


# A store in memory that belongs to whoever opened it; fsspec's own is shared by the whole process. Any thread.


class _Memory(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, object] = {}
        self.pseudo_dirs = [""]


def memory_store() -> Store:
    """An empty one."""
    return Store("memory://private", _Memory(), "")
