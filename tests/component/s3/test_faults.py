"""An S3 server that throttles, breaks off, trickles and refuses: rows, objects and a limit for every wait."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.tables.existing_parquet import describe_parquet
from tests.component.s3.conftest import SECRET
from tests.component.s3.faulty_server import FAULTS, SILENT, SLOW, THROTTLED, FaultyServer
from tests.leaks import SessionOwned

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

SEED = 7
ROWS, FILES, GROUP, WIDTH = 24_000, 6, 500, 16
LIMIT = 6.0  # seconds of retries: an attempt may take 1
AWAY = 3.0  # where no attempt succeeds
# Per request. An attempt that waits in vain costs a second, the others less.
RATES = {fault: 0.02 if fault in (SLOW, SILENT) else 0.06 for fault in FAULTS}


@pytest.fixture(scope="module")
def shared_server(endpoint: str, session_owned: SessionOwned) -> Iterator[FaultyServer]:
    """Clients keep connections to it."""
    server = FaultyServer(endpoint, SEED)
    session_owned.ports.add(server.server_port)
    with session_owned.adopt():
        server.start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: FaultyServer) -> FaultyServer:
    shared_server.reset(SEED)
    return shared_server


@pytest.fixture
def faulty(store: Store, server: FaultyServer) -> Store:
    """The store, by way of the faulty server."""
    return open_faulty(store, server, key="someone", secret=SECRET)


def open_faulty(store: Store, server: FaultyServer, **options: Any) -> Store:
    return Store.open(store.url, retry_seconds=LIMIT, endpoint_url=server.url, **options)


def write_rows(store: Store) -> Manifest:
    """Files with an id in each row, and numbers that follow from it."""
    for number in range(FILES):
        ids = np.arange(number, ROWS, FILES)
        flat = pa.array(np.repeat(ids, WIDTH).astype(np.float32))
        table = pa.table({"id": ids, "x": pa.FixedSizeListArray.from_arrays(flat, WIDTH), "unused": ids})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=GROUP)
        store.write_bytes(f"rows/{number}.parquet", sink.getvalue().to_pybytes())
    return describe_parquet(replace(store, root=f"{store.root}/rows"), ["id", "x"])


def read_epoch(
    store: Store,
    manifest: Manifest,
    epoch: int,
    cache_bytes: int = 1,
    at_step_5: Callable[[], object] = lambda: None,
) -> tuple[Counter[int], float]:
    """How often each row came, and the longest wait for a row group: a step may need several, each with faults."""
    plan = DataPlan.for_run(manifest.group_rows, 512, 3, 4, manifest.max_decoded_group_bytes(), 4 << 20)
    seen: Counter[int] = Counter()
    longest = 0.0
    # Without a cache, lanes read row groups again and again.
    with closing(open_reader("arrow", store, manifest, cache_bytes=cache_bytes)) as reader:
        fetch = reader.fetch

        def fetch_timed(group: int) -> ColumnArrays:
            nonlocal longest
            begin = time.monotonic()
            try:
                return fetch(group)
            finally:
                longest = max(longest, time.monotonic() - begin)

        with patch.object(reader, "fetch", fetch_timed):
            with StepLoader(plan, reader, manifest.columns).steps(epoch, 0, 0, 1) as steps:
                for rows in steps:
                    if rows.step == 5:
                        at_step_5()
                    ids = rows.columns["id"]
                    assert (rows.columns["x"] == ids[:, None]).all()
                    seen.update(ids.tolist())
    return seen, longest


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_survived_by_all(store: Store, server: FaultyServer, faulty: Store, fault: str) -> None:
    content = np.random.default_rng(5).bytes(100_000)
    server.rates = {fault: 0.15 if fault == SILENT else 0.3}
    rounds = 1 if fault in (SLOW, SILENT, THROTTLED) else 3  # each of these costs a second
    for number in range(rounds):
        faulty.write_bytes(f"x/{number}", content)
        assert faulty.read_bytes(f"x/{number}") == content
        assert faulty.read_tail(f"x/{number}", 10) == content[-10:]
        assert faulty.describe(f"x/{number}").bytes == len(content)
        with faulty.open_read(f"x/{number}") as file:
            file.seek(-20, 2)
            assert file.read(10) == content[-20:-10]
    assert len(faulty.list("x")) == rounds
    assert server.injected[fault] > 0


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_no_row_is_lost_or_doubled_by_1000_faults(store: Store, server: FaultyServer, faulty: Store) -> None:
    """Epochs with a checkpoint after each."""
    manifest, content = write_rows(store), np.random.default_rng(5).bytes(300_000)
    server.rates = RATES
    rows, epochs = replace(faulty, root=f"{faulty.root}/rows"), 0
    while server.injected.total() < 1000:
        seen, longest = read_epoch(rows, manifest, epochs)
        assert seen == Counter(range(ROWS)), "each row once"
        assert longest < LIMIT
        epochs += 1
        faulty.write_verified(f"checkpoints/{epochs}", content)
        assert faulty.read_bytes(f"checkpoints/{epochs}") == content
    assert len(faulty.list("checkpoints")) == epochs
    assert set(server.injected) == set(RATES)


def test_a_store_that_stays_away_is_one_error(store: Store, server: FaultyServer, faulty: Store) -> None:
    manifest = write_rows(store)
    server.away = True
    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"attempts in 3 s failed, the last with") as raised:
        read_epoch(replace(faulty, root=f"{faulty.root}/rows", retry_seconds=AWAY), manifest, 0)
    assert AWAY / 2 < time.monotonic() - begin < 2 * AWAY
    assert "\n" not in str(raised.value)
    assert SECRET not in str(raised.value)
    with pytest.raises(StoreError, match="Cannot write 'y' in the store s3://"):
        replace(faulty, retry_seconds=1).write_bytes("y", b"1")


def test_a_store_that_comes_back_is_waited_for(store: Store, server: FaultyServer, faulty: Store) -> None:
    manifest = write_rows(store)
    server.away = True
    back = threading.Timer(AWAY / 2, lambda: setattr(server, "away", False))
    back.start()
    seen, longest = read_epoch(replace(faulty, root=f"{faulty.root}/rows"), manifest, 0)
    back.join()
    assert seen == Counter(range(ROWS))
    assert AWAY / 3 < longest < LIMIT * 1.5


@pytest.mark.parametrize("method", ["read_bytes", "describe"])
def test_a_connection_given_up_is_tried_again(store: Store, server: FaultyServer, method: str) -> None:
    """botocore's own retries, which mostly outlast an attempt's limit, are off: each reset comes to us as its error."""
    store.write_bytes("object", b"1")
    server.away = True
    back = threading.Timer(0.5, lambda: setattr(server, "away", False))
    back.start()
    without = {"retries": {"max_attempts": 0}}
    given_up = open_faulty(store, server, key="someone", secret=SECRET, config_kwargs=without)
    found = getattr(given_up, method)("object")
    assert found in (b"1", store.describe("object"))
    back.join()
    assert server.requests > 2


def test_what_never_succeeds_is_not_tried_again(store: Store, server: FaultyServer, faulty: Store) -> None:
    with pytest.raises(StoreError, match="has no 'nothing'"):
        faulty.read_bytes("nothing")
    assert server.requests < 4
    server.token = "another"
    with pytest.raises(StoreError, match="PermissionError"):
        faulty.read_bytes("nothing")


def test_renewed_credentials_are_used_in_the_middle_of_an_epoch(
    store: Store, server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"

    def issue(token: str) -> None:
        (tmp_path / "new").write_text(
            f"[default]\naws_access_key_id=a\naws_secret_access_key={SECRET}\naws_session_token={token}\n"
        )
        (tmp_path / "new").replace(file)

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    manifest = write_rows(store)
    issue("first")
    server.token = "first"
    rows = open_faulty(replace(store, url=store.url + "/rows"), server)

    def renew() -> None:
        server.token = "second"
        issue("second")

    seen, _ = read_epoch(rows, manifest, 0, cache_bytes=64 << 20, at_step_5=renew)
    assert seen == Counter(range(ROWS))


def test_row_groups_are_read_by_a_request_each(store: Store, server: FaultyServer, faulty: Store) -> None:
    manifest = write_rows(store)
    seen, _ = read_epoch(replace(faulty, root=f"{faulty.root}/rows"), manifest, 0, cache_bytes=64 << 20)
    assert seen == Counter(range(ROWS))
    assert server.most_at_once > 2
    # One for each row group (its two columns are neighbours), one for its file's state, two for each file's footer.
    assert server.requests == 2 * len(manifest.row_groups) + 2 * FILES


def test_the_rest_of_a_file_is_read_by_one_request(server: FaultyServer, faulty: Store) -> None:
    content = np.random.default_rng(5).bytes(3_000_000)
    faulty.write_bytes("x", content)
    with faulty.open_read("x") as file:
        assert file.read(10) == content[:10]
        before = server.requests
        assert file.read() == content[10:]
        assert file.read() == b""
        assert server.requests <= before + 1


@pytest.mark.parametrize("seconds", [0, -1, 1000, "30", None])
def test_a_limit_of_retries_is_checked(seconds: Any) -> None:
    with pytest.raises(InvalidInput, match="retry_seconds"):
        Store.open("memory://x", retry_seconds=seconds)
