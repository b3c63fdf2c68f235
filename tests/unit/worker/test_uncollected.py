"""Moments without a collection of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_elastic.worker.stack_sampler import gc_paused


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_nothing_is_collected_inside_not_even_after_a_moment_within_it() -> None:
    with gc_paused:
        assert not gc.isenabled()
        with gc_paused:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_it_and_who_collects_nothing_stays_so() -> None:
    with pytest.raises(KeyError), gc_paused:
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with gc_paused:
        pass
    assert not gc.isenabled()


def test_one_thread_after_the_other() -> None:
    def disabled(_: int) -> bool:
        with gc_paused:
            return not gc.isenabled()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(disabled, range(2000)))
    assert gc.isenabled()
