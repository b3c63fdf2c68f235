"""A data set that petastorm 0.13.1 encoded (`petastorm_rows`, images by Pillow), read without petastorm."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.tables.existing_parquet import describe_parquet, locate_files
from tests.planned_rows import read_columns

ROWS = Path(__file__).parent / "petastorm_rows"
NAMES = ["id", "small", "matrix", "packed", "picture", "grey", "plain"]
PICTURE = np.arange(60).reshape(4, 5, 3)


@pytest.mark.parametrize(("path", "piece_bytes"), [("", 1 << 20), ("part-0.parquet", 100)])
def test_every_codec_decodes_the_encoded_values(path: str, piece_bytes: int) -> None:
    pytest.importorskip("PIL")
    store, names = locate_files([str(ROWS / path)], {})
    manifest = describe_parquet(store, NAMES, names=names, piece_bytes=piece_bytes)
    assert manifest.columns == (
        Column("id", "int32"),
        Column("small", "uint8"),
        Column("matrix", "float32", (2, 3), "ndarray"),
        Column("packed", "int64", (4,), "compressed_ndarray"),
        Column("picture", "uint8", (4, 5, 3), "image"),
        Column("grey", "uint16", (4, 5), "image"),
        Column("plain", "float64"),
    )
    assert Manifest.from_json(manifest.to_json()) == manifest
    found = read_columns(store, manifest)
    assert {name: str(found[name].dtype) for name in NAMES} == {c.name: c.dtype for c in manifest.columns}
    for row in range(6):
        assert (found["id"][row], found["small"][row], found["plain"][row]) == (row, row * 20, row / 2)
        assert np.array_equal(found["matrix"][row], np.arange(6).reshape(2, 3) + row)
        assert np.array_equal(found["packed"][row], np.arange(4) * row)
        assert np.array_equal(found["picture"][row], PICTURE + row)
        assert np.array_equal(found["grey"][row], np.arange(20).reshape(4, 5) * 1000 + row)


def test_images_without_a_decoder_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("PIL", "cv2"):
        monkeypatch.setitem(sys.modules, package, None)
    store = Store.open(str(ROWS))
    assert describe_parquet(store, ["matrix"]).columns[0].shape == (2, 3), "no image, no decoder"
    with pytest.raises(InvalidInput, match="neither Pillow nor OpenCV is here: pip install pillow"):
        describe_parquet(store, ["picture"])


def test_rows_of_another_shape_and_damaged_ones_are_named(tmp_path: Path) -> None:
    shutil.copytree(ROWS, tmp_path / "rows")
    table = pq.read_table(ROWS / "part-0.parquet")
    for name, value, says in (
        ("packed", None, "has 1 nulls in 6 rows"),
        ("matrix", b"\x93NUMPY", "has a value that is no ndarray of petastorm's"),
        ("packed", table["matrix"][0].as_py(), r"a row of float32 and shape \(2, 3\), and others of int64"),
    ):
        values = [*table[name].to_pylist()[:5], value]
        changed = table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.binary()))
        pq.write_table(changed, tmp_path / "rows" / "part-0.parquet")
        store = Store.open(str(tmp_path / "rows"))
        with pytest.raises((InvalidInput, StoreError), match=says):
            read_columns(store, describe_parquet(store, [name]))


def test_a_schema_of_unknown_classes_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROWS, tmp_path / "rows")
    schema = pq.read_schema(ROWS / "_common_metadata")
    foreign = {b"dataset-toolkit.unischema.v1": b"cos\nsystem\n(S'touch unpickled'\ntR."}
    pq.write_metadata(schema.with_metadata(foreign), tmp_path / "rows" / "_common_metadata")
    with pytest.raises(InvalidInput, match=r"petastorm schema in .* cannot be read .*reader='petastorm'"):
        describe_parquet(Store.open(str(tmp_path / "rows")), ["id"])
