"""Tables of catalogs that vend keys for seconds: found by name, and read for longer than the keys are valid."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pyspark import cloudpickle
from spark_elastic import Rows
from spark_elastic.data.row_access import RowAccess
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from tests.component.s3.catalog_server import TOKEN, UNITY, CatalogServer
from tests.component.s3.conftest import SECRET
from tests.component.s3.faulty_server import FaultyServer
from tests.leaks import SessionOwned

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

ROWS = 300
SECONDS = 1.0  # for which keys are valid where they end


@pytest.fixture(scope="module")
def s3(endpoint: str, session_owned: SessionOwned) -> Iterator[FaultyServer]:
    """S3 that takes vended keys alone, as long as they are valid."""
    server = FaultyServer(endpoint, 1)
    session_owned.ports.add(server.server_port)
    with session_owned.adopt():
        server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tables(endpoint: str) -> dict[str, Any]:
    """A table of Delta and one of Iceberg, in a bucket: name -> what a catalog knows of it."""
    deltalake = pytest.importorskip("deltalake")
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    bucket = uuid.uuid4().hex
    Store.open(f"s3://{bucket}/x", key="someone", secret=SECRET, endpoint_url=endpoint).filesystem.mkdir(
        bucket
    )
    table = pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS) * 0.5})
    options = {
        "aws_access_key_id": "someone",
        "aws_secret_access_key": SECRET,
        "aws_endpoint_url": endpoint,
        "aws_allow_http": "true",
        "aws_region": "us-east-1",
        "aws_s3_allow_unsafe_rename": "true",
    }
    for number in range(3):
        part = table.slice(number * ROWS // 3, ROWS // 3)
        deltalake.write_deltalake(f"s3://{bucket}/delta", part, mode="append", storage_options=options)
    catalog = sql.SqlCatalog(
        "made",
        **{
            "uri": "sqlite:///:memory:",
            "warehouse": f"s3://{bucket}/wh",
            "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
            "s3.endpoint": endpoint,
            "s3.access-key-id": "someone",
            "s3.secret-access-key": SECRET,
        },
    )
    catalog.create_namespace("ns")
    iceberg = catalog.create_table("ns.digits", table.schema)
    for number in range(3):
        iceberg.append(table.slice(number * ROWS // 3, ROWS // 3))
    place = iceberg.metadata_location
    metadata = json.loads(iceberg.metadata.model_dump_json())
    catalog.close()
    facts = {
        "name": "digits",
        "table_type": "EXTERNAL",
        "data_source_format": "DELTA",
        "storage_location": f"s3://{bucket}/delta",
        "table_id": "4711",
        "properties": {},
    }
    return {"unity": facts, "iceberg": (place, metadata)}


@pytest.fixture
def server(s3: FaultyServer, tables: dict[str, Any]) -> Iterator[CatalogServer]:
    catalog = CatalogServer(s3.url)
    catalog.unity["main.ns.digits"] = tables["unity"]
    catalog.iceberg["ns.digits"] = tables["iceberg"]
    s3.reset(1)
    s3.ends = catalog.ends
    catalog.start()
    yield catalog
    catalog.stop()
    s3.reset(1)


def name_unity(server: CatalogServer, token: Any = TOKEN) -> dict[str, Any]:
    return {
        "table": "main.ns.digits",
        "catalog": {"type": "unity", "uri": server.url, "token": token},
        "storage_options": {"endpoint_url": server.endpoint, "retry_seconds": 3.0},
    }


def name_rest(server: CatalogServer, token: Any = TOKEN) -> dict[str, Any]:
    catalog = {
        "type": "rest",
        "uri": server.url,
        "token": token,
        "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO",
    }
    return {"table": "ns.digits", "catalog": catalog, "storage_options": {"retry_seconds": 3.0}}


def name_object(server: CatalogServer) -> dict[str, Any]:
    named = name_rest(server)
    from pyiceberg.catalog import load_catalog

    return {**named, "catalog": load_catalog("mine", **named["catalog"])}


def read_ids(rows: Rows) -> list[int]:
    access = RowAccess(rows.store, rows.manifest)
    groups = range(len(rows.manifest.row_groups))
    return sorted(np.concatenate([access.reader.fetch(group)["id"] for group in groups]).tolist())


@pytest.mark.parametrize("name", [name_unity, name_rest, name_object])
def test_rows_are_read_for_longer_than_keys_are_valid(
    server: CatalogServer, name: Callable[..., dict[str, Any]]
) -> None:
    rows = cloudpickle.loads(cloudpickle.dumps(Rows.from_table(**name(server))))
    server.seconds = SECONDS
    begun = len(server.ends)
    while len(server.ends) < begun + 3:
        assert read_ids(rows) == list(range(ROWS))
