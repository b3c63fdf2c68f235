from __future__ import annotations

import pytest

from spark_elastic.worker.entry import Header
from spark_elastic.worker.loop import fingerprint


@pytest.mark.parametrize("span", [None, (7000, 7010)])
def test_a_header_survives_the_pipe(span: tuple[int, int] | None) -> None:
    header = Header(1, "127.0.0.1:1", "00", 1, "1-0", "127.0.0.1", span, ("torch",), 60.0, 60.0, 10, 5)
    assert Header.from_json(header.to_json()) == header


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_the_same_defect_has_the_same_fingerprint() -> None:
    assert fingerprint(raised("a")) == fingerprint(raised("a"))
    assert fingerprint(raised("a")) != fingerprint(raised("b"))
