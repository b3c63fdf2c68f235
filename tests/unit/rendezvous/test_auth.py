"""Signatures cover everything, counts grow, and sessions are bounded without opening a door to replays."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.rendezvous import auth

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


def _use(sessions: auth.Sessions, session: str, count: int) -> bool:
    return sessions.use(auth.Credentials(session, count, "0" * 64))


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
