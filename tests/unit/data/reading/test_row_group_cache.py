"""Which row groups stay decoded: those in use, then those that were released first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.data.reading.row_group_cache import RowGroupCache
from spark_elastic.errors import StoreError
from tests.patience import until


class Cache:
    """With room for three row groups; `decoded` lists what had to be decoded."""

    def __init__(self) -> None:
        self.groups = RowGroupCache(3 * 8)
        self.decoded: list[int] = []

    def decode(self, group: int) -> ColumnArrays:
        self.decoded.append(group)
        return {"x": np.array([group])}

    def fetch(self, *groups: int) -> None:
        for group in groups:
            assert self.groups.fetch(group, self.decode)["x"][0] == group

    def prefetch(self, group: int) -> bool:
        return self.groups.prefetch(group, self.decode)


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_released_row_groups_are_dropped_before_those_in_use(cache: Cache) -> None:
    cache.fetch(0, 1, 2)
    cache.groups.release(0)
    cache.fetch(3)
    cache.fetch(1, 2, 3)
    assert cache.decoded == [0, 1, 2, 3]
    cache.fetch(0)
    assert cache.decoded == [0, 1, 2, 3, 0]


def test_the_row_group_released_last_is_dropped_first(cache: Cache) -> None:
    cache.fetch(0, 1, 2)
    for group in (1, 2, 0):
        cache.groups.release(group)
    cache.fetch(3, 1, 2)
    assert cache.decoded == [0, 1, 2, 3]


def test_a_row_group_fetched_again_is_in_use_again(cache: Cache) -> None:
    cache.fetch(0, 1, 2)
    cache.groups.release()
    cache.fetch(2, 3, 2, 0)
    assert cache.decoded == [0, 1, 2, 3]


def test_a_table_that_is_read_over_and_over_keeps_a_part_in_memory(cache: Cache) -> None:
    for _ in range(10):
        for group in range(4):
            cache.fetch(group)
            cache.groups.release(group)
    assert len(cache.decoded) < 4 + 9 * 2.5  # the least is 2 of each turn


def test_a_cyclic_scan_of_row_groups_in_use_misses_only_one(cache: Cache) -> None:
    for _ in range(10):
        cache.fetch(0, 1, 2, 3)
    assert len(cache.decoded) < 4 + 9 * 2.5


def test_a_prefetched_row_group_displaces_none_in_use(cache: Cache) -> None:
    cache.fetch(0, 1)
    assert cache.prefetch(2)
    assert not cache.prefetch(3)
    assert cache.decoded == [0, 1, 2]
    cache.groups.release(1)
    assert cache.prefetch(3)
    cache.fetch(2, 3, 0)
    assert cache.decoded == [0, 1, 2, 3]


def test_a_prefetched_row_group_is_decoded_once_and_stays(cache: Cache) -> None:
    cache.fetch(0, 1)
    cache.groups.release()
    assert cache.prefetch(1)
    cache.fetch(2, 3, 1)
    assert cache.decoded == [0, 1, 2, 3]


def test_no_row_group_is_decoded_after_close(cache: Cache) -> None:
    cache.groups.close(lambda: None)
    cache.prefetch(0)
    with pytest.raises(StoreError, match="reader is closed"):
        cache.fetch(0)
    assert cache.decoded == []


class GatedCache(Cache):
    """Each row group is decoded once its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [threading.Event() for _ in range(4)]

    def decode(self, group: int) -> ColumnArrays:
        decoded = super().decode(group)
        assert self.gates[group].wait(20)
        return decoded


@pytest.mark.parametrize("fetched", [0, 3], ids=["what is being decoded", "another"])
def test_a_fetch_goes_before_a_prefetch(fetched: int) -> None:
    cache = GatedCache()
    ahead = threading.Thread(target=lambda: [cache.prefetch(group) for group in (0, 1)])
    ahead.start()
    until(lambda: cache.decoded)
    fetcher = threading.Thread(target=cache.fetch, args=(fetched,))
    fetcher.start()
    until(lambda: cache.groups._waiting)
    cache.gates[0].set()
    cache.gates[3].set()
    fetcher.join(20)  # while the gate of 1 is closed
    assert not fetcher.is_alive()
    cache.gates[1].set()
    ahead.join(20)
    assert cache.decoded == list(dict.fromkeys([0, fetched, 1]))


def test_a_failed_decoding_lets_the_next_one_start(cache: Cache) -> None:
    def fail(group: int) -> ColumnArrays:
        raise StoreError("the disk is gone")

    with pytest.raises(StoreError, match="disk is gone"):
        cache.groups.prefetch(0, fail)
    with pytest.raises(StoreError, match="disk is gone"):
        cache.groups.fetch(0, fail)
    cache.fetch(0)
