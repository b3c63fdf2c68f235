"""Reads of footers that fail are not kept."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.asyn import AsyncFileSystem, get_loop

from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups
from spark_elastic.data.object_store import RetryingClient
from spark_elastic.data.reading.group_reader import RemoteGroups
from spark_elastic.data.store import Store
from tests.leaks import SessionOwned

MANIFEST = Manifest(
    (Column("x", "int64"),), ("one",), RowGroups.of([RowGroup(0, 0, 3, 24)]), fingerprint="f", content="c"
)


class Bucket:
    """An object store with one file, whose first read waits for `broken` and fails."""

    def __init__(self) -> None:
        self.loop = get_loop()
        self._reads = 0
        self.reading = threading.Event()
        self.broken = asyncio.Event()
        buffer = io.BytesIO()
        pq.write_table(pa.table({"x": [1, 2, 3]}), buffer)
        self._content = buffer.getvalue()

    async def _info(self, path: str) -> dict[str, int]:
        self._reads += 1
        if self._reads == 1:
            self.reading.set()
            await self.broken.wait()
            raise PermissionError("the token has expired")
        return {"size": len(self._content)}

    async def _cat_file(self, path: str, start: int, end: int) -> bytes:
        return self._content[start:end]


def test_a_footer_is_read_again_after_its_read_failed_without_a_waiter(
    tmp_path: Path, session_owned: SessionOwned
) -> None:
    with session_owned.adopt():  # fsspec's thread, which it keeps for the life of the process
        bucket = Bucket()
    client = RetryingClient(cast("AsyncFileSystem", bucket), 60.0)
    groups = RemoteGroups(Store.open(tmp_path), client, MANIFEST)
    groups.announce([(0, ["x"])])
    assert bucket.reading.wait(10.0)
    groups.cancel()
    ended = client.begin(asyncio.wait(groups.footers.values()))
    bucket.loop.call_soon_threadsafe(bucket.broken.set)
    ended.result(10.0)
    assert groups.take(0, ["x"]).footer.num_rows == 3
