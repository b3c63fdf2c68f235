"""Packed objects beside the metadata of Spark ML: rows of a Parquet table, written and read by Spark.

PATH/metadata   Spark ML's own, with `format`
PATH/data       part, number, content: the bytes of a `Packed`, in pieces far below Spark's limits on one value
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from spark_elastic.errors import StoreError
from spark_elastic.estimators.persistence import Packed

FORMAT = 1  # 0: before probability columns, with output_col for prediction_col
CHUNK = 16 << 20  # bytes


def write(spark: SparkSession, path: str, packed: Packed) -> None:
    rows = [
        (part, number, bytearray(content[start : start + CHUNK]))
        for part, content in (("architecture", packed.architecture), ("weights", packed.weights))
        for number, start in enumerate(range(0, len(content), CHUNK))
    ]
    table = spark.createDataFrame(rows, "part string, number int, content binary")
    table.write.parquet(os.path.join(path, "data"))


def read(spark: SparkSession, path: str) -> Packed:
    rows = spark.read.parquet(os.path.join(path, "data")).collect()
    parts: Mapping[str, bytes] = {
        part: b"".join(bytes(r.content) for r in sorted(rows, key=lambda r: r.number) if r.part == part)
        for part in ("architecture", "weights")
    }
    return Packed(**parts)


def upgraded(metadata: dict[str, Any], path: str) -> dict[str, Any]:
    """Metadata of this or an older format, as this one's.

    Raises:
        StoreError: it was written by a newer release.
    """
    found = metadata.get("format", 0)
    if found > FORMAT:
        raise StoreError(
            f"{path} has format {found}, and this release reads up to {FORMAT}: load it with the release that "
            "wrote it, or a newer one."
        )
    for params in (metadata["paramMap"], metadata["defaultParamMap"]):
        if "output_col" in params:
            params["prediction_col"] = params.pop("output_col")
    return metadata
