"""Bytes for tasks: by a broadcast, or where there are none inside the plan of a job, or as a file of the session.

Also for transform, which imports neither engine nor trainer. Any thread.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spark_elastic.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark import Broadcast, SparkContext
    from pyspark.sql import SparkSession

MOST_CARRIED = 4 << 20  # bytes; Spark Connect takes messages of 128 MB, and each job is one


class Carrier(Protocol):
    """What brings bytes to a task: a broadcast, or one of the next."""

    @property
    def value(self) -> bytes: ...


@dataclass(frozen=True)
class Carried:
    """What a task brings along itself."""

    value: bytes


@dataclass(frozen=True)
class Attached:
    """Bytes that an executor fetches once, as a file of the session."""

    name: str

    @property
    def value(self) -> bytes:
        from pyspark import SparkFiles  # an executor has it, a client of Spark Connect alone has not

        return Path(SparkFiles.get(self.name)).read_bytes()


def broadcast(sc: SparkContext, content: bytes, what: str) -> Broadcast[bytes]:
    """Fetched once by each executor.

    Raises:
        InvalidInput: Spark's driver has no memory for it.
    """
    from py4j.protocol import Py4JJavaError

    try:
        return sc.broadcast(content)
    except Py4JJavaError as error:
        if "OutOfMemoryError" not in str(error):
            raise
    size = len(content) / 2**30
    raise InvalidInput(
        f"{what} ({size:.1f} GiB) is more than the heap of Spark's driver holds: set spark.driver.memory to "
        f"{3 * size + 1:.0f}g or more before the session begins."
    )


def carried(spark: SparkSession, content: bytes) -> Carried | Attached:
    """By a file of the session where they are many."""
    if len(content) <= MOST_CARRIED:
        return Carried(content)
    name = f"spark_elastic-{hashlib.sha256(content).hexdigest()}"
    with tempfile.TemporaryDirectory(prefix="spark_elastic-") as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        spark.addArtifacts(str(path), file=True)
    return Attached(name)
