"""What holds for every test: repeatable examples, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.leaks import SessionOwned, leaked, take

# The same examples in each run, and no deadline: a busy machine is no failure.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


@pytest.fixture(scope="session")
def session_owned() -> SessionOwned:
    """Where a session-scoped fixture adopts its processes, ports and threads; no test may use it for its own."""
    return SessionOwned()


@pytest.fixture(autouse=True)
def nothing_left_behind(session_owned: SessionOwned) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or a descriptor; closing ones get a moment to end."""
    before = take(session_owned)
    yield
    found = leaked(before, session_owned)
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
