from __future__ import annotations

import pytest

from spark_elastic.worker.entry import Header


@pytest.mark.parametrize("span", [None, (7000, 7010)])
def test_a_header_survives_the_pipe(span: tuple[int, int] | None) -> None:
    header = Header(1, "127.0.0.1:1", "00", 1, "1-0", "127.0.0.1", span, ("torch",), 60.0, 60.0, 10, 5)
    assert Header.from_json(header.to_json()) == header
