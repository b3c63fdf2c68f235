"""Bytes of tasks: with the plan where they are few, else as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from spark_elastic.errors import InvalidInput
from spark_elastic.spark.carrying import MOST_CARRIED, Attached, broadcast, carried


class Session:
    """One that takes files."""

    def __init__(self) -> None:
        self.files: list[bytes] = []

    def addArtifacts(self, path: str, file: bool) -> None:
        assert file
        self.files.append(Path(path).read_bytes())


def test_many_bytes_travel_as_a_file_of_the_session() -> None:
    session: Any = Session()
    assert carried(session, b"few").value == b"few"
    assert session.files == []
    many = bytes(MOST_CARRIED + 1)
    assert isinstance(carried(session, many), Attached)
    assert session.files == [many]


@pytest.mark.parametrize(
    ("java", "raised"),
    [("java.lang.OutOfMemoryError: Java heap space", InvalidInput), ("java.io.IOException", Py4JJavaError)],
)
def test_what_the_driver_has_no_memory_for_is_told(java: str, raised: type[Exception]) -> None:
    class Full:
        def broadcast(self, content: bytes) -> None:
            raise Told("calling", None)

    class Told(Py4JJavaError):  # type: ignore[misc,unused-ignore]
        def __init__(self, message: str, exception: Any) -> None:
            Exception.__init__(self, message)

        def __str__(self) -> str:
            return java

    context: Any = Full()
    with pytest.raises(raised, match=r"spark\.driver\.memory to 1g|IOException"):
        broadcast(context, b"many", "the program")
