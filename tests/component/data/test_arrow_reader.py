"""The Arrow reader over real Parquet files: shapes, no copies where the layout allows, bounded cache, errors."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.manifest import Column, Manifest, RowGroups
from spark_elastic.data.reading import group_reader
from spark_elastic.data.reading.decoding import HAS_CHECKSUMS, read_footers
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.data.reading.readers import read_sample_row
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

ARRAYS = Column("x", "float32", (3,)), Column("m", "float64", (2, 2))
COLUMNS = (Column("id", "int64"), *ARRAYS, Column("odd", "bool"))


def write(store: Store, name: str, first: int, rows: int, group: int) -> str:
    ids = np.arange(first, first + rows)
    table = pa.table(
        {
            "id": ids,
            "x": pa.array([[i, i + 0.5, -i] for i in ids], pa.list_(pa.float32())),
            "m": pa.array([[[i, 1], [2, 3]] for i in ids], pa.list_(pa.list_(pa.float64()))),
            "odd": ids % 2 == 1,
        }
    )
    Path(store.path("")).mkdir(exist_ok=True)
    pq.write_table(table, store.path(name), row_group_size=group)
    return name


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


@pytest.fixture
def manifest(store: Store) -> Manifest:
    names = [
        write(store, "a.parquet", 0, 25, 10),
        write(store, "b.parquet", 25, 0, 10),
        write(store, "c.parquet", 25, 20, 10),
    ]
    return Manifest(COLUMNS, *read_footers(store, names), fingerprint="", content="")


def test_a_long_footer_is_read_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(store, "a.parquet", 0, 50, 1)
    whole = read_footers(store, [name])
    monkeypatch.setattr("spark_elastic.data.reading.decoding.FOOTER_BYTES", 16)
    assert read_footers(store, [name]) == whole


@pytest.mark.skipif(not HAS_CHECKSUMS, reason="pyarrow before 15 knows no checksums of pages")
@pytest.mark.parametrize("parts", [1, 2])
def test_a_flipped_bit_in_a_file_with_checksums_is_named(store: Store, parts: int) -> None:
    name = "a.parquet"
    store.write_bytes(name, b"")
    pq.write_table(
        pa.table({"x": np.random.default_rng(0).normal(size=1000)}), store.path(name), compression="none",
        use_dictionary=False, write_page_checksum=True,
    )  # fmt: skip
    files, groups = read_footers(store, [name])
    if parts > 1:
        whole = groups[0]
        cut = replace(whole, rows=500, parent_rows=1000, part_rows=500)
        groups = RowGroups.of([cut, replace(cut, first_row=500)])
    manifest = Manifest((Column("x", "float64"),), files, groups, fingerprint="", content="")
    content = bytearray(store.read_bytes(name))
    content[4000] ^= 1
    store.write_bytes(name, bytes(content))
    says = r"row group 0 of 'a\.parquet'.* by their checksum: bring the file back"
    with closing(ArrowReader(store, manifest)) as reader, pytest.raises(StoreError, match=says):
        reader.fetch(0)


def test_arrays_have_the_manifest_s_shapes(store: Store, manifest: Manifest) -> None:
    with closing(ArrowReader(store, manifest)) as reader:
        decoded = reader.fetch(3)
        ids = np.arange(25, 35)
        assert np.array_equal(decoded["id"], ids)
        assert np.array_equal(decoded["x"], np.stack([ids, ids + 0.5, -ids], axis=1).astype("float32"))
        assert np.array_equal(decoded["m"][:, 0, 0], ids)
        assert np.array_equal(decoded["odd"], ids % 2 == 1)
        kinds = {name: (array.dtype.name, array.shape) for name, array in decoded.items()}
        assert kinds == {column.name: (column.dtype, (10, *column.shape)) for column in COLUMNS}
        assert not any(array.flags.writeable for array in decoded.values())


def test_numbers_are_views_of_arrow_s_memory(store: Store, manifest: Manifest) -> None:
    with closing(ArrowReader(store, manifest)) as reader:
        decoded = reader.fetch(0)
        assert not any(decoded[name].flags.owndata for name in ("id", "x", "m"))
        before = pa.total_allocated_bytes()
        del decoded
        reader.close()
        assert pa.total_allocated_bytes() < before


def test_the_sample_row_comes_from_the_smallest_row_group(store: Store, manifest: Manifest) -> None:
    moment, x = read_sample_row(store, manifest, ["id", "x"])
    assert moment == 20
    assert x.tolist() == [20, 20.5, -20]


def test_open_files_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_reader, "OPEN_FILES", 2)
    names = [write(store, f"{n}.parquet", n * 5, 5, 5) for n in range(6)]
    manifest = Manifest(COLUMNS, *read_footers(store, names), fingerprint="", content="")
    with closing(ArrowReader(store, manifest, cache_bytes=0)) as reader:
        for group in (0, 1, 2, 3, 4, 5, 0, 5):
            assert reader.fetch(group)["id"][0] == group * 5
            assert len(reader._files) <= 2


def test_many_threads_may_fetch(store: Store, manifest: Manifest) -> None:
    wrong: list[int] = []
    with closing(ArrowReader(store, manifest, cache_bytes=manifest.max_decoded_group_bytes())) as reader:

        def fetch_all() -> None:
            for group in [0, 1, 2, 3, 4] * 10:
                if reader.fetch(group)["id"][0] != (0, 10, 20, 25, 35)[group]:
                    wrong.append(group)

        threads = [threading.Thread(target=fetch_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_missing_or_changed_file_is_named(store: Store, manifest: Manifest) -> None:
    with closing(ArrowReader(store, manifest)) as reader:
        store.delete("c.parquet")
        with pytest.raises(StoreError, match=r"row group 0 of 'c\.parquet'"):
            reader.fetch(3)
        write(store, "a.parquet", 0, 25, 7)
        with pytest.raises(StoreError, match="not the manifest's 10"):
            reader.fetch(0)
