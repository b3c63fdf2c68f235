"""Who may read the status page, and what it answers; without a socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from spark_elastic.rendezvous.http1 import HttpRequest
from spark_elastic.rendezvous.status_app import PAGE_TTL, Page, StatusApp
from spark_elastic.testing import FakeClock


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class StatusClient:
    """A status application with three pages, and a client of it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.made = 0
        kinds = {"": "text/html", "data": "application/json", "metrics": "text/plain"}
        pages = {name: Page(kind, self._make) for name, kind in kinds.items()}
        self.status_app = StatusApp({**pages, "broken": Page("text/plain", self._break)}, self.clock)

    def _make(self) -> bytes:
        self.made += 1
        return b"made"

    def _break(self) -> bytes:
        raise RuntimeError("defect")

    def ask(
        self, path: str, query: str = "", headers: Sequence[tuple[str, str]] = (), method: str = "GET"
    ) -> Answer:
        response = self.status_app.answer(HttpRequest(method, path, query, dict(headers), 0, False))
        head, _, body = response.encode(with_body=method != "HEAD").partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")[1:]
        return Answer(response.status, dict(line.split(": ", 1) for line in lines), body)

    def enter(self, path: str = "/status/") -> Answer:
        return self.ask(path, f"token={self.status_app.token}")


@pytest.fixture
def visitor() -> StatusClient:
    return StatusClient()


def test_the_address_with_its_token_sets_a_cookie_that_admits(visitor: StatusClient) -> None:
    first = visitor.enter()
    cookie = first.headers["set-cookie"]
    assert first.headers["content-security-policy"].startswith("default-src 'none'")
    assert first.headers["cache-control"] == "no-store"
    assert (first.status, first.body) == (200, b"made")
    assert "HttpOnly" in cookie
    assert "SameSite" in cookie
    assert visitor.status_app.token not in cookie
    assert "path" not in cookie.lower()  # a proxy's prefix is not ours to know
    later = visitor.ask("/status/data", headers=[("cookie", cookie.split(";")[0])])
    assert (later.status, later.headers["content-type"]) == (200, "application/json")
    assert "set-cookie" not in later.headers


@pytest.mark.parametrize("name", ["x-status-token", "authorization"])
def test_the_token_admits_as_a_header(visitor: StatusClient, name: str) -> None:
    value = visitor.status_app.token if name.startswith("x") else f"Bearer {visitor.status_app.token}"
    assert visitor.ask("/metrics", headers=[(name, value)]).status == 200


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("", []),
        ("token=", []),
        ("token=guess", []),
        ("token=%ff%00", []),
        ("", [("x-status-token", "")]),
        ("", [("authorization", "Bearer ")]),
        ("", [("cookie", "spark_elastic_00000000=x")]),
        ("", [("cookie", 'a="\\400; \x01=')]),
    ],
)
@pytest.mark.parametrize("path", ["/status/", "/status/data", "/metrics", "/status/../rendezvous/hello"])
def test_requests_without_the_token_get_no_information(
    visitor: StatusClient, path: str, query: str, headers: Sequence[tuple[str, str]]
) -> None:
    answer = visitor.ask(path, query, headers)
    assert answer.status == 401
    assert visitor.made == 0
    assert "set-cookie" not in answer.headers


def test_an_empty_or_foreign_cookie_of_the_right_name_is_refused(visitor: StatusClient) -> None:
    name = visitor.enter().headers["set-cookie"].split("=")[0]
    for value in ("", visitor.status_app.token, "ä"):
        assert visitor.ask("/status/data", headers=[("cookie", f"{name}={value}")]).status == 401


def test_a_page_is_made_at_most_every_half_second(visitor: StatusClient) -> None:
    for _ in range(5):
        visitor.enter()
    assert visitor.made == 1
    visitor.clock.sleep(PAGE_TTL)
    visitor.enter()
    assert visitor.made == 2


def test_a_page_that_raises_is_answered_with_an_error(
    visitor: StatusClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert visitor.enter("/status/broken").status == 500
    assert "the status page /status/broken failed" in caplog.text
    assert visitor.enter("/status/nothing").status == 404


def test_head_sends_no_body(visitor: StatusClient) -> None:
    answer = visitor.ask("/status/", f"token={visitor.status_app.token}", method="HEAD")
    assert (answer.body, answer.headers["content-length"]) == (b"", "4")
