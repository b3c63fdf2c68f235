"""Row groups in memory, in the memory of a host that its readers share, and in pieces on its disk."""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.available_memory import measure_available_memory
from spark_elastic.data.reading import group_reader
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.data.reading.row_group_cache import (
    DEFAULT_CACHE_BYTES,
    RowGroupCache,
)
from spark_elastic.data.scratch import find_scratch_folders, make_scratch_folder
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.tables.existing_parquet import describe_parquet
from tests.patience import until


class Cache:
    """With room for three row groups; `decoded` lists what had to be decoded."""

    def __init__(self) -> None:
        self.groups = RowGroupCache(3 * 8)
        self.decoded: list[int] = []

    def decode(self, group: int) -> ColumnArrays:
        self.decoded.append(group)
        return {"x": np.array([group])}

    def fetch(self, *groups: int) -> None:
        for group in groups:
            assert self.groups.fetch(group, self.decode)["x"][0] == group

    def prefetch(self, group: int) -> bool:
        return self.groups.prefetch(group, self.decode)


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.mark.parametrize(
    ("calls", "decoded"),
    [
        # Released row groups are dropped before those in use,
        ("fetch 0 1 2, release 0, fetch 3 1 2 3", [0, 1, 2, 3]),
        ("fetch 0 1 2, release 0, fetch 3 1 2 3 0", [0, 1, 2, 3, 0]),
        # the one released last first; one fetched again is in use again.
        ("fetch 0 1 2, release 1 2 0, fetch 3 1 2", [0, 1, 2, 3]),
        ("fetch 0 1 2, release all, fetch 2 3 2 0", [0, 1, 2, 3]),
        # A prefetched row group displaces none in use, is decoded once and stays.
        ("fetch 0 1, prefetch 2, refuse 3, release 1, prefetch 3, fetch 2 3 0", [0, 1, 2, 3]),
        ("fetch 0 1, release all, prefetch 1, fetch 2 3 1", [0, 1, 2, 3]),
    ],
)
def test_row_groups_are_dropped_in_the_order_of_use(cache: Cache, calls: str, decoded: list[int]) -> None:
    for call in calls.split(", "):
        what, *groups = call.split()
        for group in groups:
            match what:
                case "fetch":
                    cache.fetch(int(group))
                case "release":
                    cache.groups.release(None if group == "all" else int(group))
                case _:
                    assert cache.prefetch(int(group)) is (what == "prefetch")
    assert cache.decoded == decoded


def test_a_table_that_is_read_over_and_over_keeps_a_part_in_memory(cache: Cache) -> None:
    for _ in range(10):
        for group in range(4):
            cache.fetch(group)
            cache.groups.release(group)
    assert len(cache.decoded) < 4 + 9 * 2.5  # the least is 2 of each turn


def test_a_cyclic_scan_of_row_groups_in_use_misses_only_one(cache: Cache) -> None:
    for _ in range(10):
        cache.fetch(0, 1, 2, 3)
    assert len(cache.decoded) < 4 + 9 * 2.5


def test_no_row_group_is_decoded_after_close(cache: Cache) -> None:
    cache.groups.close(lambda: None)
    cache.prefetch(0)
    with pytest.raises(StoreError, match="reader is closed"):
        cache.fetch(0)
    assert cache.decoded == []


class GatedCache(Cache):
    """Each row group is decoded once its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [threading.Event() for _ in range(4)]

    def decode(self, group: int) -> ColumnArrays:
        decoded = super().decode(group)
        assert self.gates[group].wait(20)
        return decoded


@pytest.mark.parametrize("fetched", [0, 3], ids=["what is being decoded", "another"])
def test_a_fetch_goes_before_a_prefetch(fetched: int) -> None:
    cache = GatedCache()
    ahead = threading.Thread(target=lambda: [cache.prefetch(group) for group in (0, 1)])
    ahead.start()
    until(lambda: cache.decoded)
    fetcher = threading.Thread(target=cache.fetch, args=(fetched,))
    fetcher.start()
    until(lambda: cache.groups._waiting)
    cache.gates[0].set()
    cache.gates[3].set()
    fetcher.join(20)  # while the gate of 1 is closed
    assert not fetcher.is_alive()
    cache.gates[1].set()
    ahead.join(20)
    assert cache.decoded == list(dict.fromkeys([0, fetched, 1]))


def test_a_failed_decoding_lets_the_next_one_start(cache: Cache) -> None:
    fail = Mock(side_effect=StoreError("the disk is gone"))
    with pytest.raises(StoreError, match="disk is gone"):
        cache.groups.prefetch(0, fail)
    with pytest.raises(StoreError, match="disk is gone"):
        cache.groups.fetch(0, fail)
    cache.fetch(0)


MB = 1 << 20


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, content in {"proc/meminfo": "MemTotal: 8192 kB\nMemAvailable: 4096 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (4 * MB, 8 * MB)),
        ({"sys/fs/cgroup/memory.max": "max"}, (4 * MB, 8 * MB)),
        ({"proc/meminfo": ""}, None),
        (
            {
                "sys/fs/cgroup/memory.max": str(3 * MB),
                "sys/fs/cgroup/memory.current": str(2 * MB),
                "sys/fs/cgroup/memory.stat": f"anon {MB}\ninactive_file {MB}\n",
            },
            (2 * MB, 3 * MB),
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * MB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(5 * MB),
            },
            (0, 3 * MB),
        ),
    ],
)
def test_the_smallest_limit_of_memory_decides(
    tmp_path: Path, files: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert measure_available_memory(machine(tmp_path, files)) == expected


def test_a_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * MB, 3 * MB))
    root = machine(tmp_path, {"proc/self/statm": f"{MB // resource.getpagesize()} 1 1"})
    assert measure_available_memory(root) == (2 * MB, 3 * MB)


def group(number: int) -> Any:
    """Of 32 MB, of which nothing is ever touched."""
    return {"x": np.empty(32 * MB, np.uint8)}


def read_twice(total: int) -> tuple[int, int]:
    """(row groups decoded, row groups kept) when 20 of them, 640 MB, are read twice and are all that takes memory."""
    decoded: list[int] = []

    def decode(number: int) -> Any:
        decoded.append(number)
        return group(number)

    groups = RowGroupCache(sys.maxsize, lambda: (total - len(decoded) * 32 * MB, total))
    for number in [*range(20), *range(20)]:
        groups.fetch(number, decode)
    kept = len(groups)
    groups.close(lambda: None)
    return len(decoded), kept


def test_row_groups_that_fit_in_memory_are_read_once(caplog: Any) -> None:
    assert read_twice(1000 * MB) == (20, 20)
    assert caplog.messages == []


def test_the_cache_ends_where_a_quarter_of_the_memory_is_left(caplog: Any) -> None:
    assert read_twice(320 * MB) == (20 + 20 - 7, 7)
    (line,) = caplog.messages
    assert line.endswith("memory: 224 MB of decoded rows are kept, since 64 of 320 MB are left")


def test_a_fixed_cache_size_does_not_measure_memory() -> None:
    groups = RowGroupCache(DEFAULT_CACHE_BYTES, Mock(side_effect=AssertionError("asked")))
    for number in range(6):
        groups.fetch(number, group)
    assert len(groups) == DEFAULT_CACHE_BYTES // (32 * MB)
    groups.close(lambda: None)


# ---- row groups too large for memory on a disk that has little room, or none


ROWS, GROUPS = 1000, 6


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArrowReader:
    """Its machine has no scratch folders of other processes."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    x = np.arange(ROWS * GROUPS, dtype=np.float64)
    pq.write_table(pa.table({"x": x}), tmp_path / "a.parquet", row_group_size=ROWS)
    store = Store.open(str(tmp_path))
    return ArrowReader(store, describe_parquet(store, ["x"], piece_bytes=2000), cache_bytes=1)


@pytest.mark.parametrize(("free", "held"), [(1 << 40, GROUPS), (20_000, 3), (0, 1)])
def test_the_least_recently_used_piece_is_deleted_before_the_disk_is_full(
    reader: ArrowReader, free: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    pieces = len(reader._manifest.row_groups)
    assert pieces == GROUPS * 4
    with closing(reader):
        for _ in range(2):  # what is gone is cut again
            found = np.concatenate([reader.fetch(group)["x"] for group in range(pieces)])
            assert np.array_equal(found, np.arange(ROWS * GROUPS))
            assert len(reader._split_groups._groups_by_key) == held
    assert not reader._split_groups._groups_by_key


def test_categories_may_differ_between_the_parts_of_a_row_group(tmp_path: Path) -> None:
    """As where a dictionary page became too large, and the other pages have the values themselves."""
    words = pa.array([f"word {number}" for number in range(ROWS)]).dictionary_encode()
    table = pa.table({"word": words, "number": pa.array(np.arange(ROWS)).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    store = Store.open(str(tmp_path))
    manifest = describe_parquet(store, ["word", "number"], transformed=True, piece_bytes=2000)
    assert len(manifest.row_groups) > 4
    with closing(ArrowReader(store, manifest, cache_bytes=1)) as reader:
        parts = [reader.fetch(group) for group in range(len(manifest.row_groups))]
    assert np.concatenate([part["word"] for part in parts]).tolist() == words.to_pylist()
    assert np.concatenate([part["number"] for part in parts]).tolist() == list(range(ROWS))


def test_workers_of_a_machine_split_a_row_group_once(
    reader: ArrowReader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = ArrowReader(reader._store, reader._manifest, cache_bytes=1)
    with closing(other):
        with closing(reader):
            reader.fetch(0)
            with monkeypatch.context() as context:
                context.setattr(group_reader, "split_row_group", None)
                assert other.fetch(1)["x"].tolist() == list(range(250, 500))
            reader.fetch(4)
        # What is open stays readable; what is not is split anew.
        assert other.fetch(2)["x"].tolist() == list(range(500, 750))
        assert other.fetch(4)["x"].tolist() == list(range(1000, 1250))
    assert not [path for folder in find_scratch_folders() for path in folder.glob("*")]


def test_what_a_killed_worker_has_split_in_part_is_not_taken(reader: ArrowReader) -> None:
    with closing(reader), make_scratch_folder() as folder:
        reader.fetch(0)
        (path,) = (path for each in find_scratch_folders() for path in each.glob("*"))
        (folder / path.name).write_bytes(path.read_bytes()[:3000])
        path.unlink()
        path.touch()
        other = ArrowReader(reader._store, reader._manifest, cache_bytes=1)
        with closing(other):
            assert other.fetch(1)["x"].tolist() == list(range(250, 500))


def test_a_full_disk_is_named_with_what_to_change(reader: ArrowReader) -> None:
    says = rf"cut in {tempfile.gettempdir()} \(File too large\): set TMPDIR"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with closing(reader), pytest.raises(StoreError, match=says):
            reader.fetch(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [path for folder in find_scratch_folders() for path in folder.glob("*")]
