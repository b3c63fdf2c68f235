"""Heads of HTTP/1.1: what is well formed is understood, and everything else refused."""

from __future__ import annotations

import pytest

from spark_elastic.rendezvous import http1

HEAD = "POST /p?a=1&b HTTP/1.1\r\nHost: x\r\nContent-Length:  12 \r\nX-Empty:\r\nAccept: a\r\naccept: b"


def test_a_head_is_read() -> None:
    request = http1.parse_request(HEAD.encode())
    assert (request.method, request.path, request.query, request.length) == ("POST", "/p", "a=1&b", 12)
    assert request.fields == {"host": "x", "content-length": "12", "x-empty": "", "accept": "a, b"}
    assert not request.is_last
    assert http1.parse_request(HEAD.replace("1.1", "1.0").encode()).is_last
    assert http1.parse_request(f"{HEAD}\r\nConnection: Close".encode()).is_last


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("POST /p", "post /p"),
        ("POST /p", "POST  /p"),
        ("POST /p", "POST /p\tq"),
        ("1.1", "2.0"),
        ("Host: x\r\n", ""),
        ("Host: x", "Host : x"),
        ("Host: x", "Host: x\r\n folded"),
        ("Host: x", "Host: x\nx-other: y"),
        ("Host: x", "Host: \0"),
        ("Host: x", "nonsense"),
        ("12", "-1"),
        ("12", "1_2"),
        ("12", "²"),
        ("12", "9" * 16),
        ("12", "12\r\ncontent-length: 12"),
        ("Accept: a", "transfer-encoding: chunked"),
    ],
)
def test_what_two_readers_could_understand_differently_is_refused(written: str, instead: str) -> None:
    assert written in HEAD
    with pytest.raises(http1.MalformedHead):
        http1.parse_request(HEAD.replace(written, instead, 1).encode("latin-1"))
