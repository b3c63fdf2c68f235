"""The limit of open files is raised as far as the workers need it, or refused in a sentence."""

from __future__ import annotations

import resource

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous import http_server


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
