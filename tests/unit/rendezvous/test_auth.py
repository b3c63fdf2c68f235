"""Signatures cover everything, counts are used once, and sessions are bounded without opening a door to replays."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.rendezvous import auth

KEY = b"k" * 32


def test_a_header_comes_back_as_it_was() -> None:
    credentials = auth.sign_request(KEY, "/p", auth.create_id(), 17, b"body")
    assert auth.parse_credentials(credentials.header()) == credentials


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Elastic ",
        "Elastic a.1.b",
        "Bearer x",
        f"Elastic {'a' * 32}.1e3.{'b' * 64}",
        f"Elastic {'a' * 32}.{'1' * 16}.{'b' * 64}",
    ],
)
def test_malformed_headers_are_no_credentials(header: str) -> None:
    assert auth.parse_credentials(header) is None


def test_a_request_signature_covers_key_path_session_count_and_body() -> None:
    credentials = auth.sign_request(KEY, "/p", "s" * 32, 3, b"body")
    assert auth.request_is_genuine(KEY, "/p", credentials, b"body")
    assert not auth.request_is_genuine(b"x" * 32, "/p", credentials, b"body")
    assert not auth.request_is_genuine(KEY, "/q", credentials, b"body")
    assert not auth.request_is_genuine(KEY, "/p", credentials, b"bodY")
    for changed in (
        dataclasses.replace(credentials, session="t" * 32),
        dataclasses.replace(credentials, count=4),
        dataclasses.replace(credentials, signature="é" * 64),
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


@given(st.lists(st.integers(1, 60), max_size=200))
def test_a_count_is_used_once_in_whatever_order(counts: list[int]) -> None:
    session, used = auth.Session(), set[int]()
    for count in counts:
        assert session.use(count) == (count not in used)
        used.add(count)


def test_overtaking_within_the_window_is_fine_and_beyond_it_refused() -> None:
    session, window = auth.Session(), auth.WINDOW + 10
    taken = [
        (window, True),
        (11, True),
        (11, False),
        (10, False),
        (10**14, True),
        (window, False),
        (0, False),
    ]
    for count, fits in taken:  # 10 is too old to tell whether it was used
        assert session.use(count) is fits


def _take(sessions: auth.Sessions, session: str, count: int) -> bool:
    return sessions.use(auth.Credentials(session, count, "0" * 64))


def test_a_repeated_hello_opens_one_session() -> None:
    sessions = auth.Sessions()
    session = sessions.open("nonce")
    assert sessions.open("nonce") == session
    assert _take(sessions, session, 1)
    assert sessions.open("nonce") != session, "a used session is never handed out again"


def test_replayed_hellos_evict_no_session_in_use() -> None:
    sessions = auth.Sessions(max_unused=2, max_used=100)
    mine = sessions.open("mine")
    assert _take(sessions, mine, 1)
    opened = [sessions.open(str(n)) for n in range(5)]
    assert [sessions.is_known(session) for session in opened] == [False, False, False, True, True]
    assert sessions.is_known(mine)
    assert not _take(sessions, mine, 1)
    assert _take(sessions, mine, 2)


def test_the_session_unused_for_longest_is_forgotten_and_stays_unknown() -> None:
    sessions = auth.Sessions(max_used=2)
    a, b, c = (sessions.open(name) for name in "abc")
    assert _take(sessions, a, 1)
    assert _take(sessions, b, 1)
    assert _take(sessions, a, 2)
    assert _take(sessions, c, 1)
    assert not _take(sessions, b, 1), "a replay into a forgotten session"
    assert _take(sessions, a, 3)


def test_ids_are_not_repeated() -> None:
    random.seed(0)  # whatever the seed
    first = auth.create_id()
    random.seed(0)
    assert auth.create_id() != first
