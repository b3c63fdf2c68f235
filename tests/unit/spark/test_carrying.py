"""Bytes of tasks: with the plan where they are few, else as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spark_elastic.spark.carrying import MOST_CARRIED, Attached, carried


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
