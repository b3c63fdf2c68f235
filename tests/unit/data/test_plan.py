"""The plan by enumeration: each row once, steps and ranks level; and the manifest that it is made of."""

from __future__ import annotations

import base64
import json
import pickle
import tracemalloc
import zlib
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_elastic.data.manifest import Column, Manifest, RowGroup, RowGroups, pack_deleted
from spark_elastic.data.plan import ALONE, DataPlan, Division, draw_permutation
from spark_elastic.errors import InvalidInput, StoreError
from tests.planned_rows import list_row_ids


@st.composite
def plans(draw: st.DrawFn) -> DataPlan:
    groups = draw(st.lists(st.integers(0, 90), min_size=1, max_size=8).filter(any))
    batch = draw(st.integers(1, 300))
    most = DataPlan(tuple(groups), batch, 0, 1).base_rows
    lanes = draw(st.integers(1, min(most, 64)))
    return DataPlan(tuple(groups), batch, draw(st.integers(-(2**63), 2**64)), lanes, draw(st.booleans()))


def ids(plan: DataPlan, epoch: int, step: int, size: int) -> list[int]:
    order = plan.permute_epoch(epoch)
    return [row for rank in range(size) for row in list_row_ids(plan, order, step, rank, size).tolist()]


@given(plans(), st.integers(0, 5), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_p1_each_row_once_in_level_steps(plan: DataPlan, epoch: int, size: int) -> None:
    taken = [ids(plan, epoch, step, size) for step in range(plan.steps)]
    assert sorted(row for rows in taken for row in rows) == list(range(plan.rows))
    sizes = [len(rows) for rows in taken]
    assert sizes == [plan.count_step_rows(step) for step in range(plan.steps)]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= plan.global_batch


@given(plans(), st.integers(0, 5), st.integers(1, 70), st.data())
@settings(max_examples=200, deadline=None)
def test_p2_a_step_is_one_in_every_world(plan: DataPlan, epoch: int, size: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, plan.steps - 1))
    assert ids(plan, epoch, step, size) == ids(plan, epoch, step, 1)
    order = plan.permute_epoch(epoch)
    blocks = [order.assign_block(step, 1, rank, plan.divide(size)) for rank in range(size)]
    lengths = [block.length for block in blocks]
    assert max(lengths) - min(lengths) <= 1
    assert [block.start for block in blocks] == [sum(lengths[:rank]) for rank in range(size)]


def test_lanes_are_the_streams_that_the_protocol_defines() -> None:
    """The formula of the protocol page, written out row by row."""
    plan = DataPlan((50, 33, 20), global_batch=17, seed=3, lanes=5, shuffle=False)
    steps, q = plan.steps, plan.base_rows
    cuts = [lane * q // 5 for lane in range(6)]
    for step in range(steps):
        expected = []
        for lane in range(5):
            k = cuts[lane + 1] - cuts[lane]
            expected += range(steps * cuts[lane] + step * k, steps * cuts[lane] + (step + 1) * k)
        if step < plan.longer_steps:
            expected.append(steps * q + step)
        assert ids(plan, 0, step, 1) == expected


def test_a_ranks_share_of_a_step_touches_few_row_groups() -> None:
    plan = DataPlan((1000,) * 100, global_batch=256, seed=1, lanes=16)
    for step in range(0, plan.steps, 37):
        for rank in range(4):
            assert len(np.unique(list_row_ids(plan, 0, step, rank, 4) // 1000)) <= 16 // 4 + 3


@given(plans(), st.integers(1, 9), st.data())
@settings(max_examples=150, deadline=None)
def test_steps_of_a_block_equal_those_made_alone(plan: DataPlan, size: int, data: st.DataObject) -> None:
    first, rank = data.draw(st.integers(0, plan.steps - 1)), data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, plan.count_equal_steps(first)))
    order = plan.permute_epoch(1)
    block = order.assign_block(first, count, rank, plan.divide(size))
    found = np.full((count, block.length), -1)
    for lane in block.lanes:
        ids = np.concatenate([plan.group_offsets[group] + rows for group, rows in lane.runs])
        found[:, lane.offset : lane.offset + lane.width] = ids.reshape(count, lane.width)
    for number in range(count):
        assert np.array_equal(found[number], list_row_ids(plan, order, first + number, rank, size))


@given(plans(), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.data())
@settings(max_examples=100, deadline=None)
def test_ranks_that_divide_a_step_unequally_take_the_same_rows(
    plan: DataPlan, parts: list[int], data: st.DataObject
) -> None:
    step, order = data.draw(st.integers(0, plan.steps - 1)), plan.permute_epoch(0)
    division = Division((0, *accumulate(parts)))
    blocks = [order.assign_block(step, 1, rank, division) for rank in range(division.size)]
    runs = [run for block in blocks for lane in block.lanes for run in lane.runs]
    found = [row for group, rows in runs for row in (plan.group_offsets[group] + rows).tolist()]
    assert sorted(found) == sorted(ids(plan, 0, step, 1))
    for block, count in zip(blocks, parts, strict=True):
        assert abs(block.length - block.planned * count / sum(parts)) < 1


def test_integers_of_numpy_are_words_as_others() -> None:
    assert draw_permutation(9, np.int64(5), np.uint64(2)).tolist() == draw_permutation(9, 5, 2).tolist()


@given(st.integers(0, 3000), st.lists(st.integers(-(2**63), 2**64), max_size=3))
@settings(max_examples=60, deadline=None)
def test_the_permutation_is_the_order_of_the_outputs_of_splitmix64(length: int, words: list[int]) -> None:
    """As docs/protocol.md has it, with Python's own integers and its own sort."""
    mask, state = 2**64 - 1, 0

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    for word in words:
        state = mix((state + word + 0x9E3779B97F4A7C15) & mask)
    keys = [mix((state + n * 0x9E3779B97F4A7C15) & mask) for n in range(1, length + 1)]
    assert draw_permutation(length, *words).tolist() == sorted(range(length), key=keys.__getitem__)


def test_golden_vectors_of_the_permutation() -> None:
    assert draw_permutation(8, 0, 0).tolist() == [0, 7, 2, 5, 4, 6, 3, 1]
    assert draw_permutation(8, 42, 3, 7).tolist() == [6, 3, 5, 0, 2, 1, 7, 4]
    assert draw_permutation(5, -1, 2**64 + 5).tolist() == [2, 1, 3, 4, 0]


def test_golden_vectors_of_the_plan() -> None:
    plan = DataPlan((6, 3, 5), global_batch=5, seed=42, lanes=2)
    taken = [ids(plan, 1, step, 1) for step in range(plan.steps)]
    assert taken == [[4, 0, 7, 8, 10], [1, 2, 6, 12, 11], [3, 5, 13, 9]]


@pytest.mark.parametrize(
    ("batch", "workers", "group_bytes", "budget", "lanes"),
    [
        (1024, 4, 1 << 20, 1 << 30, 16),
        (1024, 20, 1 << 20, 1 << 30, 40),
        (1024, 100, 1 << 20, 1 << 30, 64),
        (8, 20, 1 << 20, 1 << 30, 8),
        (1024, 4, 1 << 20, 7 << 20, 5),
        (1024, 4, 1 << 30, 1 << 20, 1),
    ],
)
def test_the_number_of_lanes_follows_from_batch_workers_and_memory(
    batch: int, workers: int, group_bytes: int, budget: int, lanes: int
) -> None:
    plan = DataPlan.for_run([1 << 16] * 16, batch, 0, workers, group_bytes, budget)
    assert plan.lanes == lanes


def test_a_plan_travels_without_its_caches() -> None:
    plan = DataPlan((100,) * 50, 32, 5, 8)
    bare = len(pickle.dumps(plan))
    assert len(plan.permute_epoch(0).assign_block(0, 1, 0, ALONE).groups)
    assert len(pickle.dumps(plan)) == bare
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_permutations_of_past_row_groups_are_freed() -> None:
    plan = DataPlan((10,) * 500, 20, 5, 2)
    order = plan.permute_epoch(0)
    for step in range(plan.steps):
        order.assign_block(step, 1, 0, ALONE)
    assert len(order._permuted) <= 6


@pytest.mark.parametrize(
    ("groups", "batch", "lanes", "says"),
    [((), 4, 1, "empty"), ((0, 0), 4, 1, "empty"), ((5,), 0, 1, "at least 1"), ((5,), 4, 3, "use 1 to 2")],
)
def test_wrong_plans_are_refused(groups: tuple[int, ...], batch: int, lanes: int, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        DataPlan(groups, batch, 0, lanes)


def test_wrong_steps_and_ranks_are_refused() -> None:
    plan = DataPlan((10,), 4, 0, 1)
    with pytest.raises(InvalidInput, match="Step 3"):
        list_row_ids(plan, 0, 3)
    with pytest.raises(InvalidInput, match="Rank 2"):
        list_row_ids(plan, 0, 0, 2, 2)


@pytest.mark.scenario("G10")
def test_r08_ranks_beyond_the_rows_of_a_step_have_none() -> None:
    plan = DataPlan((3,), 3, 0, 1)
    assert sorted(len(list_row_ids(plan, 0, 0, rank, 5)) for rank in range(5)) == [0, 0, 1, 1, 1]


# ---- the manifest's document and its hash


MANIFEST = Manifest(
    (Column("x", "float32", (28, 28)), Column("y", "int64")),
    ("data/a/part-0.parquet", "data/a/part-1.parquet"),
    RowGroups.of([RowGroup(0, 0, 100, 5000), RowGroup(0, 1, 40, 2000), RowGroup(1, 0, 60, 3000)]),
    fingerprint="f00",
    content="c0",
)


def test_r19_the_hash_is_of_the_content_not_of_names() -> None:
    elsewhere = replace(MANIFEST, files=("b/0", "b/1"), fingerprint="other")
    assert elsewhere.hash == MANIFEST.hash
    assert replace(MANIFEST, content="c1").hash != MANIFEST.hash
    assert replace(MANIFEST, columns=MANIFEST.columns[:1]).hash != MANIFEST.hash
    assert replace(MANIFEST, row_groups=RowGroups.of(list(MANIFEST.row_groups)[:2])).hash != MANIFEST.hash


WHOLE = MANIFEST.to_json()


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (json.dumps(json.loads(WHOLE) | {"version": 99}), "version 99"),
        (json.dumps(json.loads(WHOLE) | {"columns": []}), "altered"),
        (json.dumps(json.loads(WHOLE) | {"row_groups": 3}), "cannot be read"),
        (WHOLE[:100], "cannot be read"),
    ],
)
def test_a_damaged_document_is_refused(document: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        Manifest.from_json(document)


def test_an_unknown_column_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"no column 'z'; it has the columns \['x', 'y'\]"):
        MANIFEST.column("z")


def test_a_mask_of_deleted_rows_takes_no_more_memory_than_its_rows_and_matches_them() -> None:
    deleted = np.arange(11) % 3 == 0
    group = RowGroup(0, 0, 7, 50, deleted=pack_deleted(deleted))
    assert group.keep_mask is not None
    assert group.keep_mask.tolist() == (~deleted).tolist()
    assert group.stored_rows == 11
    with pytest.raises(StoreError, match="do not match its rows"):
        _ = replace(group, rows=8).keep_mask
    bomb = base64.b64encode(zlib.compress(bytes(100_000_000))).decode()
    tracemalloc.start()
    assert replace(group, rows=11, deleted=f"11:{bomb}").stored_rows == 11
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
