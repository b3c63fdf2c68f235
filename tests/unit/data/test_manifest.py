"""The manifest's document and its hash."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest

from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups, pack_deleted
from spark_elastic.errors import InvalidInput, StoreError

MANIFEST = Manifest(
    (Column("x", "float32", (28, 28)), Column("y", "int64")),
    ("data/a/part-0.parquet", "data/a/part-1.parquet"),
    RowGroups.of([RowGroup(0, 0, 100, 5000), RowGroup(0, 1, 40, 2000), RowGroup(1, 0, 60, 3000)]),
    fingerprint="f00",
    content="c0",
)


def test_r19_the_hash_is_of_the_content_not_of_names() -> None:
    elsewhere = replace(MANIFEST, files=("b/0", "b/1"), fingerprint="other")
    assert elsewhere.hash == MANIFEST.hash
    assert replace(MANIFEST, content="c1").hash != MANIFEST.hash
    assert replace(MANIFEST, columns=MANIFEST.columns[:1]).hash != MANIFEST.hash
    assert replace(MANIFEST, row_groups=RowGroups.of(list(MANIFEST.row_groups)[:2])).hash != MANIFEST.hash


WHOLE = MANIFEST.to_json()


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (json.dumps(json.loads(WHOLE) | {"version": 99}), "version 99"),
        (json.dumps(json.loads(WHOLE) | {"columns": []}), "altered"),
        (json.dumps(json.loads(WHOLE) | {"row_groups": 3}), "cannot be read"),
        (WHOLE[:100], "cannot be read"),
    ],
)
def test_a_damaged_document_is_refused(document: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        Manifest.from_json(document)


def test_an_unknown_column_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"no column 'z'; it has the columns \['x', 'y'\]"):
        MANIFEST.column("z")


def test_a_mask_of_deleted_rows_takes_no_more_memory_than_its_rows_and_matches_them() -> None:
    deleted = np.arange(11) % 3 == 0
    group = RowGroup(0, 0, 7, 50, deleted=pack_deleted(deleted))
    assert group.keep_mask is not None
    assert group.keep_mask.tolist() == (~deleted).tolist()
    assert group.stored_rows == 11
    with pytest.raises(StoreError, match="do not match its rows"):
        _ = replace(group, rows=8).keep_mask
    bomb = base64.b64encode(zlib.compress(bytes(100_000_000))).decode()
    tracemalloc.start()
    assert replace(group, rows=11, deleted=f"11:{bomb}").stored_rows == 11
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
