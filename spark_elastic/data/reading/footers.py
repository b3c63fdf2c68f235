"""The footers of Parquet files: rows and row groups of each file, read once, by the driver.

Owns what footers and paths say of files. Knows nothing of columns or of Spark. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.manifest import RowGroup
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

_FIRST_READ = 64 << 10  # one read gets nearly every footer
_TRAILER = 8  # the footer's length and the magic word


def read_footers(store: Store, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[RowGroup, ...]]:
    """The files that have rows, in the order of `names`, and their row groups; StoreError where one is no Parquet."""
    files: list[str] = []
    groups: list[RowGroup] = []
    for name in names:
        metadata = read_footer(store, name)
        found = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        with_rows = [(index, group) for index, group in enumerate(found) if group.num_rows]
        if with_rows:
            groups += [
                RowGroup(len(files), index, group.num_rows, group.total_byte_size)
                for index, group in with_rows
            ]
            files.append(name)
    return tuple(files), tuple(groups)


def read_footer(store: Store, name: str) -> pq.FileMetaData:
    """One file's footer; StoreError where it is no Parquet."""
    try:
        return pq.read_metadata(pa.BufferReader(_footer(store, name)))
    except pa.ArrowException as error:
        raise StoreError(f"{name!r} in the store {store.url} is no Parquet file: {error}") from error


def partition_values(name: str) -> dict[str, str]:
    """What a file's path says of all its rows, as in `year=2024/part-0.parquet`."""
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {unquote(key): unquote(value) for key, equals, value in pairs if equals}


def _footer(store: Store, name: str) -> bytes:
    """The footer with its trailer, which alone is enough for Arrow to read the metadata."""
    tail = store.read_tail(name, _FIRST_READ)
    length = int.from_bytes(tail[-_TRAILER:-4], "little") + _TRAILER
    if length > len(tail):
        tail = store.read_tail(name, length)
    return tail[-length:]
