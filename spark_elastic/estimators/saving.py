"""Packed objects beside the metadata of Spark ML: rows of a Parquet table, written and read by Spark.

PATH/metadata   Spark ML's own, with `format`
PATH/data       part, number, content: bytes by the part's name, in pieces far below Spark's limits on one value
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.ml.util import MLWriter
from pyspark.sql import SparkSession

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.spark.active_session import has_context

FORMAT = 1  # 0: before probability columns, with output_col for prediction_col
CHUNK = 16 << 20  # bytes


def scope(spark: SparkSession) -> Any:
    """What Spark ML writes metadata with: the SparkContext, as before Spark 4; without one, the session."""
    return spark.sparkContext if has_context(spark) else spark


class OverwritingWriter(MLWriter):
    """A writer whose `overwrite()` needs no JVM."""

    def _handleOverwrite(self, path: str) -> None:
        if has_context(self.sparkSession):
            super()._handleOverwrite(path)
        else:
            folder, name = os.path.split(path.rstrip("/"))
            Store.open(folder or ".").remove_tree(name)


def write(spark: SparkSession, path: str, parts: Mapping[str, bytes]) -> None:
    rows = [
        (part, number, bytearray(content[start : start + CHUNK]))
        for part, content in parts.items()
        for number, start in enumerate(range(0, len(content), CHUNK))
    ]
    table = spark.createDataFrame(rows, "part string, number int, content binary")
    table.write.parquet(os.path.join(path, "data"))


def read(spark: SparkSession, path: str) -> dict[str, bytes]:
    rows = spark.read.parquet(os.path.join(path, "data")).collect()
    parts: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row.number):
        parts.setdefault(row.part, []).append(bytes(row.content))
    return {part: b"".join(pieces) for part, pieces in parts.items()}


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
