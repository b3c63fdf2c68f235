"""Tables of catalogs that vend keys for seconds: found by name, and read for longer than the keys are valid."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyspark import cloudpickle

from spark_elastic import Rows
from spark_elastic.data.row_handle import RowAccess
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.runs.checkpoint import CheckpointStore, OwnedRun
from spark_elastic.tables.catalogs import find_in_catalog
from spark_elastic.tables.lake_tables import join_stores, read_snapshot
from tests.component.injected_faults import inject_faults, kill
from tests.component.s3.catalog_server import SECRET as VENDED
from tests.component.s3.catalog_server import TOKEN, CatalogServer
from tests.component.s3.conftest import SECRET
from tests.component.s3.faulty_server import FaultyServer
from tests.component.torch.job import (
    RUN,
    Follower,
    LauncherFactory,
    check_every_row_once,
    difference,
    make_data,
    make_job,
    train_elastic,
    train_plain,
)
from tests.leaks import SessionOwned
from tests.patience import until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

ROWS, FILES = 300, "pyiceberg.io.fsspec.FsspecFileIO"
SECONDS = 0.5  # for which keys are valid where they end


@pytest.fixture(scope="module")
def s3(endpoint: str, session_owned: SessionOwned) -> Iterator[FaultyServer]:
    """S3 that takes vended keys alone, as long as they are valid."""
    server = FaultyServer(endpoint, 1)
    session_owned.ports.add(server.server_port)
    session_owned.thread_modules.add("asyncio_")  # of fsspec's loop, which looks up hosts there
    with session_owned.adopt():
        server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tables(endpoint: str) -> dict[str, Any]:
    """A table of Delta and one of Iceberg, in a bucket: name -> what a catalog knows of it."""
    bucket = uuid.uuid4().hex
    owner = {"key": "someone", "secret": SECRET, "endpoint_url": endpoint}
    Store.open(f"s3://{bucket}/x", **owner).filesystem.mkdir(bucket)
    table = pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS) * 0.5})
    options = delta_options(endpoint)
    for number in range(3):
        part = table.slice(number * ROWS // 3, ROWS // 3)
        for name in ("delta", "copy"):
            deltalake.write_deltalake(f"s3://{bucket}/{name}", part, mode="append", storage_options=options)
    keys = {"endpoint": endpoint, "access-key-id": "someone", "secret-access-key": SECRET}
    files = {f"s3.{name}": value for name, value in keys.items()}
    where = {"uri": "sqlite:///:memory:", "warehouse": f"s3://{bucket}/wh"}
    catalog = SqlCatalog("made", **where, **files, **{"py-io-impl": FILES})
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
    return {"unity": facts, "iceberg": (place, metadata), "copy": f"s3://{bucket}/copy"}


def delta_options(endpoint: str) -> dict[str, str]:
    return {
        "aws_access_key_id": "someone",
        "aws_secret_access_key": SECRET,
        "aws_endpoint_url": endpoint,
        "aws_allow_http": "true",
        "aws_region": "us-east-1",
        "aws_s3_allow_unsafe_rename": "true",
    }


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
        # The keys of the run's store open no table of the catalog.
        "storage_options": {"endpoint_url": server.endpoint, "key": "someone", "secret": SECRET},
    }


def name_rest(server: CatalogServer, token: Any = TOKEN) -> dict[str, Any]:
    catalog = {"type": "rest", "uri": server.url, "token": token, "py-io-impl": FILES}
    return {"table": "ns.digits", "catalog": catalog}


def name_object(server: CatalogServer) -> dict[str, Any]:
    named = name_rest(server)
    return {**named, "catalog": load_catalog("mine", **named["catalog"])}


def read_ids(rows: Rows) -> list[int]:
    access = RowAccess(rows.store, rows.manifest)
    return sorted(access.take(range(rows.count))["id"].tolist())


@pytest.mark.parametrize("name", [name_unity, name_rest, name_object])
def test_rows_outlive_the_keys_to_them(server: CatalogServer, name: Callable[..., dict[str, Any]]) -> None:
    rows = cloudpickle.loads(cloudpickle.dumps(Rows.from_table(**name(server))))
    server.seconds = SECONDS
    begun = len(server.ends)
    while len(server.ends) < begun + 2:
        assert read_ids(rows) == list(range(ROWS))


def test_keys_refused_before_their_end_are_renewed_and_no_answer_is_waited_for(server: CatalogServer) -> None:
    rows = Rows.from_table(**name_unity(server))
    assert read_ids(rows) == list(range(ROWS))
    server.ends.clear()  # as if they were revoked
    asked = server.requests.total()
    server.status = 503
    back = threading.Timer(0.3, lambda: setattr(server, "status", None))
    back.start()
    assert read_ids(rows) == list(range(ROWS))
    back.join()
    assert server.requests.total() > asked + 1


def test_credentials_that_cannot_be_renewed_end_the_read_with_one_sentence(server: CatalogServer) -> None:
    tokens = [TOKEN]
    named = name_unity(server, lambda: tokens[-1])
    rows = Rows.from_table(**named)
    server.ends.clear()
    server.token = "the-next-token"
    with pytest.raises(StoreError) as refused:
        read_ids(rows)
    assert re.fullmatch(
        r"Credentials have ended and cannot be renewed: The catalog http://\S+ gives no access to table "
        r"'main.ns.digits' \(HTTP 401: no such token: Bearer \.\.\.\): check its token, which must be valid as "
        r"long as the run, and the right to read the table from outside\.",
        str(refused.value),
    )
    # Though the reader of the others lives, in the error's traceback.
    assert read_ids(Rows.from_table(**name_unity(server, "the-next-token"))) == list(range(ROWS))
    tokens.append("the-next-token")
    assert read_ids(rows) == list(range(ROWS))
    server.status = 503
    rows = cloudpickle.loads(cloudpickle.dumps(rows))  # as a worker gets them
    rows = replace(rows, store=replace(rows.store, retry_seconds=1.0))
    with pytest.raises(StoreError, match=r"TimeoutError: \d+ attempts in 1 s failed"):
        read_ids(rows)


def test_no_secret_is_shown_or_saved(
    server: CatalogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "spark_elastic")
    monkeypatch.setenv("CATALOG_TOKEN", TOKEN)
    named = name_rest(server, "env:CATALOG_TOKEN")
    rows = Rows.from_table(**named)
    rows.save(str(tmp_path / "rows"))
    pickled = cloudpickle.dumps(rows)
    shown = [
        repr(rows), str(rows.store), repr(rows.store.filesystem), repr(rows.store.filesystem.storage_args),
        rows.describe(), (tmp_path / "rows").read_text(), caplog.text, pickled.decode("latin-1"),
    ]  # fmt: skip
    for text in shown:
        assert not [secret for secret in (TOKEN, SECRET, VENDED) if secret in text]
    again = Rows.open(str(tmp_path / "rows"), catalog=named["catalog"])
    assert (again.manifest, read_ids(again)) == (rows.manifest, list(range(ROWS)))
    with pytest.raises(StoreError):
        read_ids(Rows.open(str(tmp_path / "rows"), endpoint_url=server.endpoint, anon=True))
    with pytest.raises(InvalidInput, match="were not made from a table of a catalog"):
        Rows.open(str(save_plain(tmp_path)), catalog=named["catalog"])
    monkeypatch.delenv("CATALOG_TOKEN")
    with pytest.raises(InvalidInput, match="in the variable CATALOG_TOKEN, which this process lacks"):
        Rows.from_table(**named)


def save_plain(folder: Path) -> Path:
    pq.write_table(pa.table({"id": [1, 2]}), folder / "plain.parquet")
    Rows.from_parquet(str(folder / "plain.parquet")).save(str(folder / "plain"))
    return folder / "plain"


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"unity": "main.ns.none"}, InvalidInput, "has no table 'main.ns.none': check the name."),
        ({"rest": "ns.none"}, InvalidInput, "has no table 'ns.none': check the name."),
        ({"rest": "ns.view"}, InvalidInput, "Table 'ns.view' of .* is of the kind VIEW, which has no files"),
        ({"facts": {"table_type": "MATERIALIZED_VIEW"}}, InvalidInput, "of the kind MATERIALIZED_VIEW, which has"),
        ({"facts": {"table_type": "VIEW", "storage_location": None}}, InvalidInput, "of the kind VIEW, which has"),
        ({"facts": {"data_source_format": "ICEBERG"}}, InvalidInput, "has the format ICEBERG: .* REST catalog"),
        (
            {"facts": {"table_type": "MANAGED", "properties": {"delta.feature.catalogManaged": "supported"}}},
            InvalidInput,
            r"Only the catalog .* knows all commits of table .* \(catalogManaged\), which deltalake cannot open",
        ),
        ({"token": "other", "unity": "main.ns.digits"}, InvalidInput, r"gives no access .* \(HTTP 401: "),
        ({"token": "other", "rest": "ns.digits"}, InvalidInput, r"gives no access .* \(NotAuthorizedException: "),
        ({"status": 503, "unity": "main.ns.digits"}, StoreError, r"does not answer \(HTTP 503: busy\): check its uri"),
        ({"status": 503, "rest": "ns.digits"}, StoreError, "does not answer .*busy.*: check its uri"),
        ({"uri": "http://127.0.0.1:9", "unity": "x"}, StoreError, "does not answer .*refused.*: check its uri"),
        ({"uri": "http://127.0.0.1:9", "rest": "x"}, StoreError, "does not answer .*refused.*: check its uri"),
        ({"uri": "file:///etc", "unity": "x"}, InvalidInput, r"uri of a Unity Catalog is http\(s\)://host; got 'file"),
        (
            {"config": {"s3.remote-signing-enabled": "true"}, "rest": "ns.digits"},
            InvalidInput,
            "signs each request for table 'ns.digits' and gives no credentials",
        ),
    ],
)  # fmt: skip
def test_what_a_catalog_cannot_give_is_refused_in_one_sentence(
    server: CatalogServer, change: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    server.views.add("ns.view")
    server.status, server.config = change.get("status"), change.get("config", {})
    if "facts" in change:
        server.unity["main.ns.digits"] = {**server.unity["main.ns.digits"], **change["facts"]}
    make = name_rest if "rest" in change else name_unity
    named = make(server, change.get("token", TOKEN))
    named["table"] = change.get("unity") or change.get("rest") or named["table"]
    named["catalog"]["uri"] = change.get("uri", server.url)
    with pytest.raises(error, match=sentence) as refused:
        Rows.from_table(**named)
    text = str(refused.value)
    assert re.fullmatch(r"[^\n]+\.", text)
    assert not {"other", TOKEN} & set(re.split(r"[\s,:()]", text))


def test_arguments_that_are_no_catalog_are_refused(server: CatalogServer) -> None:
    with pytest.raises(InvalidInput, match="must be a pyiceberg Catalog or a dict of its properties"):
        Rows.from_table("ns.digits", catalog="rest")
    with pytest.raises(InvalidInput, match=r"table is its name there, such as .*; got DataFrame"):
        Rows.from_table(pa.table({"id": [1]}).to_pandas(), catalog={"type": "rest"})
    catalog = name_object(server)["catalog"]
    catalog.properties["session"] = threading.Lock()
    says = "cannot be renewed: workers cannot get the properties of .*cannot pickle"
    with pytest.raises(InvalidInput, match=says):
        Rows.from_table("ns.digits", catalog=catalog)


def test_keys_of_the_user_open_a_table_of_delta_by_its_place(endpoint: str, tables: dict[str, Any]) -> None:
    options = {"key": "someone", "secret": SECRET, "endpoint_url": endpoint}
    rows = Rows.from_table(tables["unity"]["storage_location"], storage_options=options)
    assert read_ids(rows) == list(range(ROWS))


def test_two_tables_are_read_with_keys_of_their_own(server: CatalogServer, tables: dict[str, Any]) -> None:
    other = {"table_id": "4712", "storage_location": tables["copy"]}
    server.unity["main.ns.others"] = {**tables["unity"], **other}
    parts = [
        read_snapshot(find_in_catalog(named["catalog"], name), None, named["storage_options"])
        for name in ("main.ns.digits", "main.ns.others")
        for named in [name_unity(server)]
    ]
    store, files = join_stores(parts)
    assert len(store.filesystem.roots) == 2
    for part in files:
        assert [store.describe(each.info.name).bytes for each in part] == [each.info.bytes for each in part]


@pytest.mark.native
@pytest.mark.timeout(300)
@pytest.mark.faults  # in every build tests/spark/test_hosts.py trains from a bucket; test_training_hooks.py loses all
def test_p7_workers_after_all_were_lost_continue_from_the_bucket_and_ask_for_credentials_of_their_own(
    endpoint: str, store: Store, server: CatalogServer, tables: dict[str, Any], tmp_path: Path
) -> None:
    here, _ = make_data(tmp_path)
    bucket = tables["unity"]["storage_location"].rpartition("/")[0]
    table = pq.read_table(here.path("rows/part.parquet")).combine_chunks()  # the writer mixes several
    deltalake.write_deltalake(f"{bucket}/training", table, storage_options=delta_options(endpoint))
    server.unity["main.ns.digits"] = {**tables["unity"], "storage_location": f"{bucket}/training"}
    rows = Rows.from_table(**name_unity(server))
    server.seconds = 2.0
    server.ends.clear()  # the driver's are over
    job = replace(make_job(), data=rows.store)
    make = LauncherFactory()
    begun: list[int] = []

    def lose_all() -> None:
        until(lambda: bool(CheckpointStore(store, RUN).read_published()))
        begun.append(len(server.ends))
        for slot in make.made.slots():
            kill(make.made, slot)

    ledger, run = tmp_path / "ledger", OwnedRun.acquire(store, RUN)
    with inject_faults(tmp_path / "faults", {"epoch 1": lose_all}):
        ours, result = train_elastic(
            job, store, rows.manifest, str(ledger), Follower(), make, run=run, keep_commits=False
        )
    assert begun[0] >= job.workers
    assert len(server.ends) > begun[0]
    assert any("continues from checkpoint" in world.reason for world in result.worlds)
    check_every_row_once(ledger, job.epochs)
    assert difference(ours, train_plain(job, here, rows.manifest)) < 1e-9
