"""One pool of ranks for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.component.collectives.ranks import Pool
from tests.leaks import SessionOwned


@pytest.fixture(scope="session")
def pool(session_owned: SessionOwned) -> Iterator[Pool]:
    made = Pool(session_owned)
    yield made
    made.close()
