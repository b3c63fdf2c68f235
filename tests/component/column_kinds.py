"""Files that somebody else wrote, with all kinds of columns, and a transformation that makes numbers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.packing import Ragged
from spark_elastic.data.store import Store
from spark_elastic.tables.existing_parquet import describe_parquet
from tests.planned_rows import read_columns

READERS = [
    "arrow",
    pytest.param(
        "petastorm",
        marks=[
            pytest.mark.petastorm,
            pytest.mark.filterwarnings("ignore"),
            pytest.mark.skipif(int(pa.__version__.split(".")[0]) > 14, reason="petastorm needs pyarrow 14"),
        ],
    ),
]  # with which files that somebody else wrote are read
ROWS, CLASSES = 250, 3
FEATURES = ("v", "a", "n", "image", "day", "tokens")
_LISTS = [("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
VECTOR = pa.struct([("type", pa.int8()), ("size", pa.int32()), *_LISTS])  # as Spark writes vectors


def write(path: Path, reader: str) -> None:
    """Vectors, arrays, whole numbers, pictures as bytes, days, ragged tokens; small and large row groups.

    Vectors are dense and sparse in turns, structs as Spark's; for petastorm, which leaves structs out and reads nothing
    ragged, they are arrays, and the tokens have one length.
    """
    rng = np.random.default_rng(3)
    vectors = [
        {"type": 1, "size": None, "indices": None, "values": rng.normal(size=4).tolist()}
        if row % 2
        else {"type": 0, "size": 4, "indices": [row % 4], "values": [1.0 + row % 3]}
        for row in range(ROWS)
    ]
    dense = pa.array([densify(each) for each in vectors], pa.list_(pa.float64()))
    table = pa.table(
        {
            "v": pa.array(vectors, VECTOR) if reader == "arrow" else dense,
            "a": pa.array(rng.normal(size=(ROWS, 3)).tolist(), pa.list_(pa.float64())),
            "n": pa.array(rng.integers(0, 7, ROWS), pa.int16()),
            "image": pa.array([rng.bytes(5) for _ in range(ROWS)], pa.binary()),
            "day": pa.array(rng.integers(0, 1000, ROWS), pa.int32()).cast(pa.date32()),
            "tokens": [[1 + row % 6] * (row % 5 if reader == "arrow" else 4) for row in range(ROWS)],
            "unused": pa.array([None] * ROWS, pa.string()),
            "y": pa.array(rng.integers(0, CLASSES, ROWS)),
        }
    )
    pq.write_table(table.slice(0, 40), path / "small.parquet", row_group_size=7)
    pq.write_table(table.slice(40), path / "large.parquet")


def densify(vector: dict[str, Any]) -> list[float]:
    if vector["type"] == 1:
        return list(vector["values"])
    values = [0.0] * vector["size"]
    for place, value in zip(vector["indices"], vector["values"], strict=True):
        values[place] = value
    return values


def numbers(columns: dict[str, Any]) -> dict[str, Any]:
    """Pictures, days and tokens as numbers, the others as they are."""
    pixels = np.array([np.frombuffer(image, np.uint8) for image in columns["image"]], np.float64)
    weekdays = (columns["day"].astype("int64") % 7)[:, None] / 7.0
    tokens = Ragged.of(columns["tokens"]).pad(0, to=4) / 7.0
    return columns | {"image": pixels.reshape(-1, 5) / 255, "day": weekdays, "tokens": tokens}


def open_data(folder: Path) -> tuple[Store, Manifest]:
    store = Store.open(str(folder))
    manifest = describe_parquet(store, [*FEATURES, "y"], transformed=True, piece_bytes=2000)
    assert max(manifest.group_rows) < ROWS / 2, "the large row group comes in pieces"
    return store, manifest


def read_table(store: Store, manifest: Manifest) -> dict[str, Any]:
    """The whole table in memory, as numbers, in the order of row ids."""
    return numbers(read_columns(store, manifest))
