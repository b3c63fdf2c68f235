"""Row groups too large for memory on a disk that has little room, or none."""

from __future__ import annotations

import resource
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.reading import group_reader
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.data.store import Store, find_scratch_folders, make_scratch_folder
from spark_elastic.errors import StoreError
from spark_elastic.tables.existing_parquet import describe_parquet

ROWS, GROUPS = 1000, 6


@pytest.fixture
def reader(tmp_path: Path) -> ArrowReader:
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
