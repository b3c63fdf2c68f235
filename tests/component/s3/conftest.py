"""A real S3 API: moto's server on loopback, and a store of its own for each test. `nox -s s3` has what it needs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from spark_elastic.data.store import Store
from tests.leaks import SessionOwned

SECRET = "a-secret-that-no-log-shows"


@pytest.fixture(scope="session")
def endpoint(session_owned: SessionOwned) -> Iterator[str]:
    """The server, and fsspec's thread and connections, which live as long as the process."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: nox -s s3")
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed: nox -s s3")
    server = moto.ThreadedMotoServer(port=0)
    with session_owned.adopt():
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
