"""Bytes for tasks: by a broadcast, or where there are none inside the plan of a job, or as a file of the session.

Also for transform, which imports neither engine nor trainer. Any thread.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from spark_elastic.data.store import Store, scratch_folder
from spark_elastic.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark import Broadcast, SparkContext
    from pyspark.sql import SparkSession

INLINE_AT_MOST = 4 << 20  # bytes; Spark Connect takes messages of 128 MB, and each job is one


class Payload(Protocol):
    """What brings bytes to a task: a broadcast, or one of the next."""

    @property
    def value(self) -> bytes: ...


@dataclass(frozen=True)
class InlinePayload:
    """What a task brings along itself."""

    value: bytes


@dataclass(frozen=True)
class ArtifactPayload:
    """Bytes that an executor fetches once, as a file of the session."""

    name: str

    @property
    def value(self) -> bytes:
        from pyspark import SparkFiles  # an executor has it, a client of Spark Connect alone has not

        return Path(SparkFiles.get(self.name)).read_bytes()


@dataclass(frozen=True)
class SplitPayload:
    """A program's bulk, which may lie in a file, and pickled what no file may hold."""

    bulk: InlinePayload | ArtifactPayload
    secrets: bytes = field(repr=False)

    @property
    def value(self) -> bytes:
        return pickle.dumps(_PickledParts(self.bulk.value, self.secrets))


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


def make_payload(spark: SparkSession, content: bytes) -> InlinePayload | ArtifactPayload:
    """By a file of the session where they are many."""
    if len(content) <= INLINE_AT_MOST:
        return InlinePayload(content)
    name = f"spark_elastic-{hashlib.sha256(content).hexdigest()}"
    with scratch_folder() as folder:
        path = folder / name
        path.write_bytes(content)
        spark.addArtifacts(str(path), file=True)
    return ArtifactPayload(name)


def make_program_payload(spark: SparkSession, program: object) -> InlinePayload | SplitPayload:
    """As `carried`; a file, which others may read, holds neither the values of its environment nor the options of its
    stores."""
    content = cloudpickle.dumps(program)
    if len(content) <= INLINE_AT_MOST:
        return InlinePayload(content)
    bulk = io.BytesIO()
    pickler = _SecretPickler(bulk, getattr(program, "environment", None))
    pickler.dump(program)
    return SplitPayload(make_payload(spark, bulk.getvalue()), cloudpickle.dumps(pickler.secrets))


class _SecretPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves secrets out, and keeps them in the order of their numbers."""

    def __init__(self, file: io.BytesIO, environment: object) -> None:
        super().__init__(file)
        self._environment = environment
        self.secrets: list[object] = []

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, Store) and (obj is None or obj is not self._environment):
            return None
        for number, known in enumerate(self.secrets):
            if known is obj:
                return number
        self.secrets.append(obj)
        return len(self.secrets) - 1


class _PickledParts:
    """Pickled, it becomes the program when it is loaded."""

    def __init__(self, bulk: bytes, secrets: bytes) -> None:
        self._parts = bulk, secrets

    def __reduce__(self) -> tuple[Callable[[bytes, bytes], object], tuple[bytes, bytes]]:
        return _load_parts, self._parts


class _SecretUnpickler(pickle.Unpickler):
    def __init__(self, bulk: bytes, secrets: bytes) -> None:
        super().__init__(io.BytesIO(bulk))
        self._secrets = pickle.loads(secrets)

    def persistent_load(self, pid: Any) -> object:
        return self._secrets[pid]


def _load_parts(bulk: bytes, secrets: bytes) -> object:
    return _SecretUnpickler(bulk, secrets).load()
