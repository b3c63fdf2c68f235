"""Bytes of tasks: with the plan where they are few, else as a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from py4j.protocol import Py4JJavaError

from spark_elastic.clusters.spark.payload import (
    INLINE_AT_MOST,
    InlinePayload,
    SplitPayload,
    broadcast,
    make_program_payload,
)
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.runs.checkpoint import CheckpointPolicy
from spark_elastic.worker.function_program import FunctionProgram


class Session:
    """One that takes files."""

    def __init__(self) -> None:
        self.files: list[bytes] = []

    def addArtifacts(self, path: str, file: bool) -> None:
        assert file
        self.files.append(Path(path).read_bytes())


def test_the_file_of_a_program_holds_neither_environment_nor_store_options() -> None:
    """Others may read it: it lies on the server and on executors until the session ends."""
    session: Any = Session()
    store = Store.open("memory://jobs", token="store-7f3a9c51e0")
    policy, secrets = CheckpointPolicy("run", 1), ("env-7f3a9c51e0", "store-7f3a9c51e0")
    many = bytes(INLINE_AT_MOST + 1)
    token = {"TOKEN": secrets[0]}
    program = FunctionProgram(len, (many,), environment=token, checkpoint_target=(store, policy))
    carrier = make_program_payload(session, program)
    (file,) = session.files
    assert not [secret for secret in secrets if secret.encode() in file]
    assert not [secret for secret in secrets if secret in repr(carrier)]
    assert isinstance(carrier, SplitPayload)
    carrier = replace(carrier, bulk=InlinePayload(file))  # as the executor reads it
    loaded = cloudpickle.loads(carrier.value)
    assert (loaded.environment, loaded.pickled_call) == (program.environment, program.pickled_call)
    assert loaded._checkpoint_target[0].filesystem.storage_options == store.filesystem.storage_options


@pytest.mark.parametrize(
    ("java", "raised"),
    [("java.lang.OutOfMemoryError: Java heap space", InvalidInput), ("java.io.IOException", Py4JJavaError)],
)
def test_a_broadcast_beyond_the_drivers_heap_is_an_error(java: str, raised: type[Exception]) -> None:
    class FullContext:
        def broadcast(self, content: bytes) -> None:
            raise BroadcastError("calling", None)

    class BroadcastError(Py4JJavaError):  # type: ignore[misc,unused-ignore]
        def __init__(self, message: str, exception: Any) -> None:
            Exception.__init__(self, message)

        def __str__(self) -> str:
            return java

    context: Any = FullContext()
    with pytest.raises(raised, match=r"spark\.driver\.memory to 1g|IOException"):
        broadcast(context, b"many", "the program")
