"""A store on a real S3 API: objects, exclusive creation, listing, foreign Parquet and its reader."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.store import Store, list_entries
from spark_elastic.errors import StoreError
from spark_elastic.tables.existing_parquet import describe_parquet
from tests.component.s3.conftest import SECRET
from tests.planned_rows import read_columns
from tests.special_names import check_special_names

pytestmark = pytest.mark.filterwarnings("ignore")


def test_objects_are_written_read_listed_and_deleted(store: Store) -> None:
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


def test_names_with_special_characters_are_taken_literally(store: Store) -> None:
    neighbour = replace(store, root=f"{store.root}y")
    neighbour.write_bytes("runs/ax/b/one", b"1")
    check_special_names(replace(store, root=f"{store.root[:-4]}[j]ob*"))
    assert neighbour.exists("runs/ax/b/one")


def test_a_secret_is_in_no_message(store: Store) -> None:
    assert SECRET not in repr(store)
    options = {"key": "k", "secret": SECRET, "endpoint_url": "http://127.0.0.1:1"}
    impatient = {"retries": {"max_attempts": 0}}
    url = store.url.replace("jobs", "") + "x/../y"
    gone = Store.open(url, config_kwargs=impatient, retry_seconds=1, **options)
    with pytest.raises(StoreError) as raised:
        gone.read_bytes("x")
    assert SECRET not in str(raised.value)


def test_existing_parquet_files_are_read(store: Store) -> None:
    x = pa.array([[i, -i] for i in range(50)], pa.list_(pa.float32()))
    table = pa.table({"id": np.arange(50), "x": x})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=20)
    folder = f"data/{'5e' * 16}"
    store.write_bytes(f"{folder}/{'0a' * 16}/part.parquet", sink.getvalue().to_pybytes())
    assert [(each.name, each.modified is not None) for each in list_entries(store)] == [(folder, True)]
    manifest = describe_parquet(store, ["id", "x"], piece_bytes=100)
    found = read_columns(store, manifest)["x"]
    assert np.array_equal(found, np.stack([np.arange(50), -np.arange(50)], axis=1))
