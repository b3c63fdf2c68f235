"""A store on a real S3 API: objects, exclusive creation, listing, foreign Parquet and its reader."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.foreign import describe
from spark_elastic.data.inventory import entries
from spark_elastic.data.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from tests.leaks import SessionOwned

pytest.importorskip("s3fs", reason="s3fs is not installed")
moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
SECRET = "a-secret-that-no-log-shows"


@pytest.fixture(scope="session")
def endpoint(session_owned: SessionOwned) -> Iterator[str]:
    """The server, and fsspec's thread and connections, which live as long as the process."""
    server = moto.ThreadedMotoServer(port=0)
    with session_owned.adopting():
        server.start()
        _, port = server.get_host_and_port()
        session_owned.ports.add(port)
        session_owned.thread_modules.update({"socketserver", "fsspec.asyn"})
        url = f"http://127.0.0.1:{port}"
        Store.open("s3://first/x", key="someone", secret=SECRET, endpoint_url=url).filesystem.mkdir("first")
    yield url
    server.stop()


@pytest.fixture
def store(endpoint: str) -> Store:
    options = {"key": "someone", "secret": SECRET, "endpoint_url": endpoint}
    store = Store.open(f"s3://{uuid.uuid4().hex}/jobs", **options)
    store.filesystem.mkdir(store.root.partition("/")[0])
    return store


def test_objects(store: Store) -> None:
    store.write_bytes("a/b", b"one")
    store.write_bytes("a/b", b"two")
    assert store.read_bytes("a/b") == b"two"
    assert store.read_tail("a/b", 2) == b"wo"
    assert store.create_exclusive("a/c", b"1")
    assert not store.create_exclusive("a/c", b"2")
    assert store.read_bytes("a/c") == b"1"
    assert store.list("a") == ["a/b", "a/c"]
    store.delete("a/b")
    store.remove_tree("a")
    assert store.list("a") == []
    with pytest.raises(StoreError, match="has no 'a/b'"):
        store.read_bytes("a/b")


def test_a_secret_is_in_no_message(store: Store) -> None:
    assert SECRET not in repr(store)
    gone = Store.open(
        store.url.replace("jobs", "") + "x/../y", key="k", secret=SECRET, endpoint_url="http://127.0.0.1:1"
    )
    with pytest.raises(StoreError) as raised:
        gone.read_bytes("x")
    assert SECRET not in str(raised.value)


def test_foreign_parquet(store: Store) -> None:
    table = pa.table(
        {"id": np.arange(50), "x": pa.array([[i, -i] for i in range(50)], pa.list_(pa.float32()))}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=20)
    store.write_bytes("data/set/part.parquet", sink.getvalue().to_pybytes())
    assert [(each.name, each.changed is not None) for each in entries(store)] == [("data/set", True)]
    manifest = describe(store, ["id", "x"], piece_bytes=100)
    reader = open_reader("arrow", store, manifest)
    found = np.concatenate([reader.fetch(group)["x"] for group in range(len(manifest.row_groups))])
    reader.close()
    assert np.array_equal(found, np.stack([np.arange(50), -np.arange(50)], axis=1))
