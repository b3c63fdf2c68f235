"""The loader over a real reader and over one that stalls or fails, and its thread that decodes ahead."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_elastic.data import loader
from spark_elastic.data.loader import DecodePrefetcher, Prefetch, StepLoader, StepRows
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.decoding import ColumnArrays, nbytes, read_footers
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.data.reading.row_group_cache import RowGroupCache
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from tests.full_process import refuse_next_thread
from tests.patience import until

COLUMNS = (Column("id", "int64"), Column("x", "float32", (2,)))
PLAN = DataPlan((10, 10, 10, 7), global_batch=8, seed=5, lanes=3)


class Rows:
    """A reader that holds its rows in memory; `gate` closed makes it stall, `broken` makes it fail."""

    def __init__(self, plan: DataPlan = PLAN) -> None:
        self.plan = plan
        self.gate = threading.Event()
        self.gate.set()
        self.broken: Exception | None = None
        self.fetched = 0

    def fetch(self, group: int) -> ColumnArrays:
        assert self.gate.wait(20)
        if self.broken is not None:
            raise self.broken
        self.fetched += 1
        ids = np.arange(self.plan.row_groups[group]) + self.plan.group_offsets[group]
        return {"id": ids, "x": np.stack([ids, -ids], axis=1).astype("float32")}

    def prefetch(self, group: int) -> bool:
        return True

    def announce(self, groups: Iterable[int]) -> None:
        pass

    def release(self, group: int | None = None) -> None:
        pass

    def close(self) -> None:
        self.gate.set()


def read_all_ranks(made: StepLoader, epoch: int, size: int) -> list[StepRows]:
    found = []
    for rank in range(size):
        with made.steps(epoch, 0, rank, size) as stream:
            found += list(stream)
    return found


@pytest.mark.parametrize("size", [1, 3, 11])
def test_p1_each_row_once_with_its_own_values(tmp_path: Path, size: int) -> None:
    store = Store.open(str(tmp_path))
    ids = np.arange(37)
    table = pa.table({"id": ids, "x": pa.array([[i, -i] for i in ids], pa.list_(pa.float32()))})
    pq.write_table(table, store.path("a.parquet"), row_group_size=10)
    manifest = Manifest(COLUMNS, *read_footers(store, ["a.parquet"]), fingerprint="", content="")
    plan = DataPlan(manifest.group_rows, 8, 5, 3)
    with closing(ArrowReader(store, manifest)) as reader:
        found = read_all_ranks(StepLoader(plan, reader, reader.columns), 2, size)
    assert sorted(row for rows in found for row in rows.row_ids.tolist()) == list(range(37))
    for rows in found:
        assert np.array_equal(rows.columns["id"], rows.row_ids)
        assert np.array_equal(rows.columns["x"], np.stack([rows.row_ids, -rows.row_ids], axis=1))
        assert rows.columns["x"].flags.writeable
        assert rows.planned == plan.count_step_rows(rows.step)


def test_a_rank_without_rows_gets_empty_arrays() -> None:
    found = read_all_ranks(StepLoader(PLAN, Rows(), COLUMNS), 0, 9)
    empty = [rows for rows in found if not len(rows)]
    assert empty
    for rows in empty:
        assert rows.columns["x"].shape == (0, 2)
        assert rows.columns["x"].dtype == np.float32
        assert rows.row_ids.shape == (0,)
        assert rows.planned > 0


def wait_until_read(stream: loader.StepStream, steps: int) -> None:
    with stream._changed:
        assert stream._changed.wait_for(lambda: len(stream._ready) == steps, 10)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)], ids=["the same rank", "another world"])
def test_the_next_epoch_is_read_before_it_begins(rank: int, size: int) -> None:
    made = StepLoader(PLAN, Rows(), COLUMNS, Prefetch(steps=3))
    with made.steps(0, 0, 0, 1, epochs=2) as first:
        assert [rows.epoch for rows in first] == [0] * PLAN.steps
        wait_until_read(first, 3)
    assert first._thread.is_alive()
    with made.steps(1, 0, rank, size, epochs=2) as second:
        assert (second is first) == (size == 1)
        found = list(second)
    with StepLoader(PLAN, Rows(), COLUMNS).steps(1, 0, rank, size) as alone:
        expected = list(alone)
    assert [(rows.epoch, rows.step) for rows in found] == [(1, step) for step in range(PLAN.steps)]
    for got, wanted in zip(found, expected, strict=True):
        assert np.array_equal(got.row_ids, wanted.row_ids)
        assert np.array_equal(got.columns["x"], wanted.columns["x"])
    assert not first._thread.is_alive(), "after the last epoch nothing is read"
    assert not second._thread.is_alive()


def test_the_loader_ends_a_stream_that_reads_the_next_epoch() -> None:
    made = StepLoader(PLAN, Rows(), COLUMNS, Prefetch(steps=3))
    with made.steps(0, 0, 0, 1, epochs=2) as stream:
        list(stream)
    made.close()
    assert not stream._thread.is_alive()


def test_a_stream_that_is_left_in_mid_epoch_reads_no_further() -> None:
    made = StepLoader(PLAN, Rows(), COLUMNS, Prefetch(steps=100))
    with made.steps(0, 0, 0, 1, epochs=2) as stream:
        wait_until_read(stream, 2 * PLAN.steps)
        next(stream)
    assert not stream._thread.is_alive()
    with made.steps(0, 1, 0, 1, epochs=2) as rest:
        assert [rows.step for rows in rest] == list(range(1, PLAN.steps))
    made.close()


def assert_read(stream: loader.StepStream, most: int) -> None:
    """So many steps are read ahead, and no more."""
    wait_until_read(stream, most)
    with stream._changed:
        assert not stream._changed.wait_for(lambda: len(stream._ready) > most, 0.1)
    assert len(list(stream)) == PLAN.steps


def test_reading_ahead_is_bounded_in_steps_and_bytes() -> None:
    row_bytes = 8 + 8 + 8
    for prefetch, most in [
        (Prefetch(steps=2), 2),
        (Prefetch(steps=100, bytes=3 * 8 * row_bytes), 3),
        (Prefetch(steps=100, bytes=1), 1),
    ]:
        with StepLoader(PLAN, Rows(), COLUMNS, prefetch).steps(0, 0, 0, 1) as stream:
            assert_read(stream, most)


def test_the_read_ahead_limit_counts_the_real_size_of_bytes_columns() -> None:
    class Images(Rows):
        def fetch(self, group: int) -> ColumnArrays:
            rows = super().fetch(group)
            images = np.empty(len(rows["id"]), dtype=object)
            images[:] = [b"0" * 1000] * len(images)
            return rows | {"image": images}

    columns = (*COLUMNS, Column("image", "object"))
    made = StepLoader(PLAN, Images(), columns, Prefetch(steps=100, bytes=2 * 8 * 1100))
    with made.steps(0, 0, 0, 1) as stream:
        assert_read(stream, 2)
    assert stream._ready_bytes == 0


def test_a_reader_s_error_comes_after_the_steps_that_were_read() -> None:
    reader = Rows()
    made = StepLoader(PLAN, reader, COLUMNS, Prefetch(steps=1))
    with made.steps(0, 0, 0, 1) as stream:
        wait_until_read(stream, 1)
        reader.broken = StoreError("the disk is gone")
        assert next(stream).step == 0
        with pytest.raises(StoreError, match="the disk is gone"):
            list(stream)


def test_p5_a_reader_that_stalls_is_an_error_with_the_step() -> None:
    reader = Rows()
    reader.gate.clear()
    with StepLoader(PLAN, reader, COLUMNS, Prefetch(deadline=0.05)).steps(4, 2, 0, 1) as stream:
        says = r"step 2 of epoch 5 did not come: the store has not answered for 0.05 s"
        with pytest.raises(StoreError, match=says):
            next(stream)
        reader.broken = StoreError("gone")  # so that the thread, which closing awaits briefly, ends here
        reader.gate.set()
        stream._thread.join(20)


class SlowRows(Rows):
    """Whose every row group takes a while."""

    def __init__(self, plan: DataPlan) -> None:
        super().__init__(plan)
        self.reads = threading.Event()

    def fetch(self, group: int) -> ColumnArrays:
        self.reads.set()
        time.sleep(0.04)
        return super().fetch(group)


ONE_STEP = DataPlan((10,) * 40, global_batch=400, seed=5, lanes=40)


def test_a_step_that_reads_much_does_not_time_out_while_the_store_answers() -> None:
    reader = SlowRows(ONE_STEP)
    with StepLoader(ONE_STEP, reader, COLUMNS, Prefetch(deadline=1.0)).steps(0, 0, 0, 1) as stream:
        assert len(next(stream)) == 400
    assert reader.fetched == 40


def test_close_waits_for_one_row_group_not_for_the_step() -> None:
    reader = SlowRows(ONE_STEP)
    with StepLoader(ONE_STEP, reader, COLUMNS).steps(0, 0, 0, 1) as stream:
        assert reader.reads.wait(10)
    assert reader.fetched <= 2
    assert stream._failed is None


def test_close_frees_a_waiting_consumer_and_ends_the_thread() -> None:
    reader = Rows()
    reader.gate.clear()
    stream = StepLoader(PLAN, reader, COLUMNS).steps(0, 0, 0, 1)
    said: list[str] = []

    def consume() -> None:
        try:
            next(stream)
        except StoreError as error:
            said.append(str(error))
            reader.gate.set()

    with stream:
        consumer = threading.Thread(target=consume)
        consumer.start()
        stream.close()
        consumer.join(10)
    assert said == ["This stream of steps is closed: ask the loader for a new one."]
    assert not stream._thread.is_alive()


class GatedPrefetchRows(Rows):
    """What is decoded ahead waits for a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.open = threading.Event(), threading.Event()

    def prefetch(self, group: int) -> bool:
        self.begun.set()
        return self.open.wait(20)


def test_p5_an_error_is_raised_while_another_row_group_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MIN_GROUP_BYTES_FOR_THREAD", 0)
    reader = GatedPrefetchRows()
    reader.broken = StoreError("the disk is gone")
    reader.gate.clear()
    with StepLoader(PLAN, reader, COLUMNS).steps(0, 0, 0, 1) as stream:
        assert reader.begun.wait(20)
        reader.gate.set()
        with pytest.raises(StoreError, match="the disk is gone"):
            next(stream)
        reader.open.set()


def test_close_ends_the_decoding_thread_before_the_gathering_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MIN_GROUP_BYTES_FOR_THREAD", 0)
    reader = GatedPrefetchRows()
    reader.gate.clear()
    stream = StepLoader(PLAN, reader, COLUMNS).steps(0, 0, 0, 1)
    with stream:
        assert reader.begun.wait(20)
        closing = threading.Thread(target=stream.close)
        closing.start()
        until(lambda: stream._ahead._stopped)
        reader.open.set()
        stream._ahead._thread.join(20)
        assert not stream._ahead._thread.is_alive()
        reader.gate.set()
        closing.join(20)
    assert not stream._thread.is_alive()


class CachingRows(Rows):
    """Keeps as many row groups as the plan's lanes need, and counts how often each is decoded."""

    def __init__(self, plan: DataPlan) -> None:
        super().__init__(plan)
        self.decoded: Counter[int] = Counter()
        self.groups = RowGroupCache((plan.lanes + 2) * nbytes(super().fetch(0)))

    def _decode(self, group: int) -> ColumnArrays:
        self.decoded[group] += 1
        return super().fetch(group)

    def fetch(self, group: int) -> ColumnArrays:
        return self.groups.fetch(group, self._decode)

    def prefetch(self, group: int) -> bool:
        return self.groups.prefetch(group, self._decode)

    def release(self, group: int | None = None) -> None:
        self.groups.release(group)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [128, 90], ids=["steps alike", "longer steps"])
def test_a_row_group_is_decoded_once_for_each_lane_however_many_steps_it_has(
    batch: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "MIN_GROUP_BYTES_FOR_THREAD", 0 if threads == 2 else 1 << 40)
    plan = DataPlan((100,) * 50, batch, seed=5, lanes=8)
    reader = CachingRows(plan)
    made = StepLoader(plan, reader, COLUMNS, Prefetch(steps=2))
    for epoch in range(3):
        reader.decoded.clear()
        with made.steps(epoch, 0, 0, 1) as stream:
            assert sum(len(rows) for rows in stream) == 5000
        # Two lanes meet in some, the one at the epoch's beginning and the other at its end; and the thread that decodes
        # ahead may come too late for some.
        assert reader.decoded.total() <= 50 + 2 * plan.lanes


# ---- decoding ahead


class Reader:
    """Counts. What is decoded ahead is held up by a closed `gate`, and takes one of `room`."""

    def __init__(self) -> None:
        self.answers = 0
        self.ahead: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.tried: list[int] = []
        self.room = 100

    def count_answer(self) -> None:
        self.answers += 1

    def fetch(self, group: int) -> ColumnArrays:
        return {"x": np.array([group])}

    def prefetch(self, group: int) -> bool:
        self.tried.append(group)
        assert self.gate.wait(20)
        self.fetch(group)
        if not self.room:
            return False
        self.room -= 1
        self.ahead.append(group)
        return True

    def announce(self, groups: Iterable[int]) -> None:
        pass

    def release(self, group: int | None = None) -> None:
        self.room += 1

    def close(self) -> None:
        pass


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def ahead(reader: Reader) -> Iterator[DecodePrefetcher]:
    with DecodePrefetcher(reader, 3, reader.count_answer) as made:
        yield made
        reader.gate.set()


def test_decoding_pauses_at_its_limit_until_one_is_fetched(ahead: DecodePrefetcher, reader: Reader) -> None:
    ahead.ask(range(6))
    until(lambda: len(reader.ahead) == 3)
    assert ahead.fetch(0)["x"][0] == 0
    until(lambda: len(reader.ahead) == 4)
    assert not ahead._can_decode()
    assert reader.ahead == [0, 1, 2, 3]


def test_decoding_waits_for_a_release_where_there_is_no_room(ahead: DecodePrefetcher, reader: Reader) -> None:
    reader.room = 1
    ahead.ask([0, 1, 2])
    until(lambda: ahead._full)
    assert reader.tried == [0, 1]
    ahead.fetch(0)
    ahead.release(0)
    until(lambda: reader.tried == [0, 1, 1, 2])
    assert reader.ahead == [0, 1]


def test_a_release_while_there_is_no_room_is_not_missed(ahead: DecodePrefetcher, reader: Reader) -> None:
    reader.room = 0
    reader.gate.clear()
    ahead.ask([0])
    until(lambda: reader.tried)
    assert ahead._releases == 0
    ahead._releases = 1  # as `release` does, behind the look for room
    reader.gate.set()
    until(lambda: len(reader.tried) == 2)


@pytest.mark.parametrize("most", [0, 3], ids=["small row groups", "no thread can be started"])
def test_the_fetching_thread_decodes_where_there_is_no_other(
    most: int, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_next_thread(monkeypatch)
    with DecodePrefetcher(reader, most, reader.count_answer) as ahead:
        ahead.ask([0, 1])
        assert ahead.fetch(0)["x"][0] == 0
        ahead.release(0)
    assert reader.tried == []
