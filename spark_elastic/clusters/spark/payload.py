"""Bytes that tasks need: sent as a broadcast, inside the plan of a job, or as a file of the session.

Predictions use it as well, on executors that import neither engine nor trainer. Any thread.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from spark_elastic.data.scratch import make_scratch_folder
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.pickling import WorkerPickler, pickle_for_workers

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic.spark")

INLINE_AT_MOST = 4 << 20  # bytes; Spark Connect accepts messages of 128 MB, and each job is one
BROADCAST_FROM = 16 << 10  # bytes; a broadcast of fewer takes longer than they take in each task


class Payload(Protocol):
    """Brings bytes to a task: a broadcast, or one of the classes below."""

    @property
    def value(self) -> bytes: ...


@dataclass(frozen=True)
class InlinePayload:
    """Bytes inside the pickled task."""

    value: bytes = field(repr=False)  # INLINE_AT_MOST bytes at most

    def __reduce__(self) -> tuple[Any, ...]:
        # A task of a probe is to start even where our package is missing.
        return SimpleNamespace, (), {"value": self.value}


@dataclass(frozen=True)
class ArtifactPayload:
    """Bytes that an executor fetches once, as a file of the session."""

    name: str  # the file's name in the session

    @property
    def value(self) -> bytes:
        from pyspark import SparkFiles  # executors have it, Spark Connect's own client has not

        return Path(SparkFiles.get(self.name)).read_bytes()


@dataclass(frozen=True)
class SplitPayload:
    """A pickled program in two parts, so that no secret lies in a file that others may read."""

    bulk: InlinePayload | ArtifactPayload  # the program without its secrets; may lie in a file
    secrets: bytes = field(repr=False)  # the secrets, pickled

    @property
    def value(self) -> bytes:
        return pickle.dumps(_PickledParts(self.bulk.value, self.secrets))


@contextmanager
def share(sc: SparkContext, content: bytes, what: str) -> Iterator[Payload]:
    """A payload that tasks can read as long as the block runs. what: the bytes in words. Raises InvalidInput: Spark's
    driver has no memory for them."""
    from py4j.protocol import Py4JJavaError

    if len(content) < BROADCAST_FROM:
        yield InlinePayload(content)
        return
    try:
        shipped = sc.broadcast(content)
    except Py4JJavaError as error:
        if "OutOfMemoryError" not in str(error):
            raise
        size = len(content) / 2**30
        raise InvalidInput(
            f"{what} ({size:.1f} GiB) is more than the heap of Spark's driver holds: set spark.driver.memory to "
            f"{3 * size + 1:.0f}g or more before the session begins."
        ) from None
    try:
        yield shipped
    finally:
        try:
            shipped.destroy()  # on the executors, and its file on this machine
        except Exception as error:  # a stopped SparkContext has dropped its broadcasts already
            log.debug("broadcast not destroyed: %s", error)


def make_payload(spark: SparkSession, content: bytes) -> InlinePayload | ArtifactPayload:
    """A payload without a SparkContext: inline, or a file of the session if `content` is large."""
    if len(content) <= INLINE_AT_MOST:
        return InlinePayload(content)
    name = f"spark_elastic-{hashlib.sha256(content).hexdigest()}"
    with make_scratch_folder() as folder:
        path = folder / name
        path.write_bytes(content)
        spark.addArtifacts(str(path), file=True)
    return ArtifactPayload(name)


def make_program_payload(spark: SparkSession, program: object) -> InlinePayload | SplitPayload:
    """A payload with a pickled program. Its environment and its stores with their options stay out of files."""
    content = pickle_for_workers(program)
    if len(content) <= INLINE_AT_MOST:
        return InlinePayload(content)
    bulk = io.BytesIO()
    pickler = _SecretPickler(bulk, getattr(program, "environment", None))
    pickler.dump(program)
    return SplitPayload(make_payload(spark, bulk.getvalue()), pickle_for_workers(pickler.secrets))


class _SecretPickler(WorkerPickler):
    """Replaces secrets by numbers, and collects them in the order of the numbers."""

    def __init__(self, file: io.BytesIO, environment: object) -> None:
        from spark_elastic.data.store import Store  # not at the top: it takes long, and slots do without

        super().__init__(file)
        self._environment, self._store_class = environment, Store
        self.secrets: list[object] = []

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, self._store_class) and (obj is None or obj is not self._environment):
            return None
        for number, known in enumerate(self.secrets):
            if known is obj:
                return number
        self.secrets.append(obj)
        return len(self.secrets) - 1


@dataclass(frozen=True)
class _PickledParts:
    """Its pickle loads as the program."""

    bulk: bytes
    secrets: bytes

    def __reduce__(self) -> tuple[Callable[[bytes, bytes], object], tuple[bytes, bytes]]:
        return _load_parts, (self.bulk, self.secrets)


class _SecretUnpickler(pickle.Unpickler):
    """Puts the secrets back in the place of their numbers."""

    def __init__(self, bulk: bytes, secrets: bytes) -> None:
        super().__init__(io.BytesIO(bulk))
        self._secrets = pickle.loads(secrets)

    def persistent_load(self, pid: Any) -> object:
        return self._secrets[pid]


def _load_parts(bulk: bytes, secrets: bytes) -> object:
    return _SecretUnpickler(bulk, secrets).load()
