"""HTTP of the driver: well-formed heads, signatures that cover everything, sessions, the status page, open files."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous import auth, http1, http_server
from spark_elastic.rendezvous.http1 import HttpRequest
from spark_elastic.rendezvous.status_app import PAGE_TTL, Page, StatusApp
from spark_elastic.testing import FakeClock

# ---- heads of HTTP/1.1: what is well formed is understood, and everything else refused


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


# ---- signatures and sessions, which open no door to replays


KEY = b"k" * 32


def test_a_request_signature_covers_key_path_session_count_and_body() -> None:
    credentials = auth.sign_request(KEY, "/p", "s" * 32, 3, b"body")
    assert auth.request_is_genuine(KEY, "/p", credentials, b"body")
    assert not auth.request_is_genuine(b"x" * 32, "/p", credentials, b"body")
    assert not auth.request_is_genuine(KEY, "/q", credentials, b"body")
    assert not auth.request_is_genuine(KEY, "/p", credentials, b"bodY")
    for changed in (
        dataclasses.replace(credentials, session="t" * 32),
        dataclasses.replace(credentials, count=4),
        dataclasses.replace(credentials, signature="é" * auth.SIGNATURE_DIGITS),
    ):
        assert not auth.request_is_genuine(KEY, "/p", changed, b"body")


def test_a_reply_signature_covers_its_request_status_and_body() -> None:
    credentials = auth.sign_request(KEY, "/p", "s" * 32, 3, b"")
    signature = auth.sign_reply(KEY, credentials, 200, b"yes")
    assert auth.reply_is_genuine(KEY, credentials, 200, b"yes", signature)
    other = dataclasses.replace(credentials, count=4)
    assert not auth.reply_is_genuine(KEY, other, 200, b"yes", signature)
    assert not auth.reply_is_genuine(KEY, credentials, 400, b"yes", signature)
    assert not auth.reply_is_genuine(KEY, credentials, 200, b"no", signature)
    # A signature made for one purpose proves nothing in the other.
    assert signature != auth.sign_request(KEY, "/p", "s" * 32, 3, b"").signature
    assert len(signature) * 4 >= 128  # bits: half of the hash's, the least that RFC 2104 recommends


def _use(sessions: auth.Sessions, session: str, count: int) -> bool:
    return sessions.use(auth.Credentials(session, count, "0" * auth.SIGNATURE_DIGITS))


@given(st.lists(st.integers(1, 60), max_size=200))
def test_counts_of_a_session_grow(counts: list[int]) -> None:
    sessions, highest = auth.Sessions(), 0
    session = sessions.open(auth.create_id())
    for count in counts:
        assert _use(sessions, session, count) is (count > highest)
        highest = max(highest, count)


def test_replayed_hellos_make_the_server_keep_nothing() -> None:
    sessions = auth.Sessions(max_used=2)
    mine = sessions.open(auth.create_id())
    assert _use(sessions, mine, 1)
    for _ in range(5):
        assert sessions.is_known(sessions.open(auth.create_id()))
    assert not _use(sessions, mine, 1)
    assert _use(sessions, mine, 2)


def test_a_server_with_too_many_sessions_forgets_all_and_takes_no_replay() -> None:
    sessions = auth.Sessions(max_used=2)
    a, b, c = (sessions.open(auth.create_id()) for _ in range(3))
    assert [_use(sessions, session, 1) for session in (a, b, c)] == [True, True, False]
    assert not any(_use(sessions, session, count) for session in (a, b, c) for count in (1, 2))
    assert _use(sessions, sessions.open(auth.create_id()), 1)


# ---- who may read the status page, and what it answers; without a socket


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
        self.status_app = StatusApp(
            {**pages, "broken": Page("text/plain", Mock(side_effect=RuntimeError("defect")))}, self.clock
        )

    def _make(self) -> bytes:
        self.made += 1
        return b"made"

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


# ---- the limit of open files is raised as far as the workers need it, or refused in a sentence


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is set; the process's own limits stay. The last one is what holds."""
    held = [(1024, 20_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: held.append(pair))
    return held


def test_the_soft_limit_is_raised_where_it_is_too_low(limits: list[tuple[int, int]]) -> None:
    http_server.raise_file_limit(20)
    assert limits == [(1024, 20_000)]
    http_server.raise_file_limit(2000)
    soft, hard = limits[-1]
    assert 12_000 < soft < 13_000
    assert hard == 20_000
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    http_server.raise_file_limit(10**6)
    assert len(limits) == 3, "it is enough"


def test_jobs_side_by_side_have_room_for_the_workers_of_all(limits: list[tuple[int, int]]) -> None:
    with http_server.reserve_files(1000), http_server.reserve_files(1000):
        assert 12_000 < limits[-1][0] < 13_000
        with http_server.reserve_files(2000):  # what the others have open counts already
            assert limits[-1] == (20_000, 20_000)
    limits[:] = [(1024, 20_000)]
    with http_server.reserve_files(20):
        assert limits == [(1024, 20_000)], "the others have ended"


def test_a_hard_limit_that_is_too_low_is_refused_with_the_number_of_workers_that_fits(
    limits: list[tuple[int, int]],
) -> None:
    with pytest.raises(InvalidInput, match=r"for 5000 workers.*ulimit -Hn.*max_workers to (\d+)") as raised:
        http_server.raise_file_limit(5000)
    fits = int(str(raised.value).rsplit("max_workers to ", 1)[1].split()[0])
    assert 3000 < fits < 3300
    http_server.raise_file_limit(fits - 5)
    with pytest.raises(InvalidInput):
        http_server.raise_file_limit(fits + 5)
    limits[:] = [(64, 64)]  # no worker fits
    with pytest.raises(InvalidInput, match=r"raise its hard limit \(ulimit -Hn\)\.$"):
        http_server.raise_file_limit(2)
