"""Which rows a step of an epoch takes, and which of them a rank takes: arithmetic, pure.

An epoch is a permutation of the rows that is cut into lanes: a fixed number of row streams that each step takes a few
rows of, so that only as many row groups as lanes are open at a time (docs/protocol.md, "The data plan, exactly").
Progress is the step's number alone. `DataPlan` is a value; an `EpochPermutation` belongs to one thread.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import InvalidInput

Int64s = npt.NDArray[np.int64]

MAX_LANES = 64
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def draw_permutation(length: int, *words: int) -> Int64s:
    """A permutation of `range(length)` that depends on `words` alone, the same in every version and on every machine.

    The argsort of the first `length` outputs of SplitMix64 (Steele, Lea, Flood 2014), seeded by absorbing the words.
    They are all different (odd increment, bijective mix), so that no two sorting algorithms can disagree.
    """
    counters = np.arange(1, length + 1, dtype=np.uint64)
    keys = _splitmix64(np.uint64(_absorb_words(words)) + counters * np.uint64(_GOLDEN))
    # The upper 16 bits first, which numpy sorts by counting: then few keys change places, in a fifth of the time.
    near = np.argsort((keys >> np.uint64(48)).astype(np.uint16), kind="stable")
    return near[np.argsort(keys[near], kind="stable")].astype(np.int64, copy=False)


def draw_uniform(rows: Int64s, count: int, *words: int) -> npt.NDArray[np.float64]:
    """(rows, count) numbers in [0, 1) that depend on each row's number and `words` alone, like `draw_permutation`."""
    seeds = _splitmix64(np.uint64(_absorb_words(words)) + rows.astype(np.uint64) * np.uint64(_GOLDEN))
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_splitmix64(seeds[:, None] + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def count_affordable_lanes(decoded_group_bytes: int, budget_bytes: int) -> int:
    """For how many lanes the row groups fit into memory. Two more are open: of longer steps, and the next one."""
    return max(1, budget_bytes // max(1, decoded_group_bytes) - 2)


def compute_rank_shares(shares: int, rank: int, size: int) -> tuple[int, int]:
    """The virtual shares `first ... behind the last` of a rank: neighbours, as many on each rank give or take one."""
    return shares * rank // size, shares * (rank + 1) // size


def compute_share_bounds(planned: int, shares: int, share: int) -> tuple[int, int]:
    """The rows `first ... behind the last` of a virtual share in a step of `planned` rows."""
    return planned * share // shares, planned * (share + 1) // shares


@dataclass(frozen=True)
class Division:
    """How ranks divide the rows of each step: into parts that differ by a row at most; a rank takes neighbours."""

    cuts: tuple[int, ...]  # rank i takes the parts `cuts[i] ... cuts[i + 1]`; the last is the number of parts

    @classmethod
    def equal(cls, size: int, shares: int = 0) -> Division:
        """As many rows, or virtual shares if there are any, for each of `size` ranks, give or take one."""
        parts = shares or size
        return cls((*(compute_rank_shares(parts, rank, size)[0] for rank in range(size)), parts))

    @property
    def size(self) -> int:
        return len(self.cuts) - 1

    @property
    def parts(self) -> list[int]:
        """The parts of each rank."""
        return [past - first for first, past in pairwise(self.cuts)]

    def get_rank_parts(self, rank: int) -> tuple[int, int]:
        """The parts `first ... behind the last` of a rank."""
        return self.cuts[rank], self.cuts[rank + 1]

    def compute_rank_bounds(self, planned: int, rank: int) -> tuple[int, int]:
        """The rows `first ... behind the last` of a rank in a step of `planned` rows."""
        first, past = self.get_rank_parts(rank)
        return planned * first // self.cuts[-1], planned * past // self.cuts[-1]


ALONE = Division((0, 1))  # one rank has all rows


def _absorb_words(words: Sequence[int]) -> int:
    state = 0
    for word in words:  # as `_splitmix64` does; for single numbers numpy takes ten times as long
        x = (state + operator.index(word) + _GOLDEN) & _WORD  # numpy's integers overflow
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
        state = x ^ (x >> 31)
    return state


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class LaneRows:
    """The rows of one lane that a rank takes in consecutive steps."""

    offset: int  # where they begin in the rank's rows of each step
    width: int  # how many they are in each step
    runs: tuple[tuple[int, Int64s], ...]  # (row group, rows inside it), step by step


@dataclass(frozen=True)
class RankBlock:
    """One rank's rows of consecutive steps, which have equally many rows."""

    step: int  # the first step
    count: int  # how many steps
    planned: int  # rows of each step over all ranks
    start: int  # the rank takes the rows `start ... start + length` of each step's
    length: int  # 0: none
    lanes: tuple[LaneRows, ...]  # those of which the rank takes rows, in the order of the step's rows

    @cached_property
    def groups(self) -> list[int]:
        """The row group of each run, in the order in which the lanes' rows are gathered."""
        return [group for lane in self.lanes for group, _ in lane.runs]


@dataclass(frozen=True)
class DataPlan:
    """The rows of every step of every epoch. All fields stay the same for the whole run (R19, resuming a run)."""

    row_groups: tuple[int, ...]  # rows of each row group, in the manifest's order
    global_batch: int  # the most rows that a step may take
    seed: int  # decides the order, together with the epoch
    lanes: int  # row streams that an epoch is cut into
    shuffle: bool = True  # whether groups and rows are shuffled, or keep the manifest's order
    shares: int = 0  # virtual shares of each step, which ranks take whole; 0: ranks divide its rows
    drop_last: bool = False  # whether each step has `global_batch` rows, and what is left over is left out

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InvalidInput(f"The global batch is {self.global_batch}: it must have at least 1 row.")
        if any(rows < 0 for rows in self.row_groups):
            raise InvalidInput(f"A row group has {min(self.row_groups)} rows: the manifest is damaged.")
        if self.rows < 1:
            raise InvalidInput("There are no rows to train on: the data set is empty.")
        if not self.steps:
            raise InvalidInput(
                f"drop_last leaves nothing of {self.rows} rows, which are less than one global batch of "
                f"{self.global_batch}: lower global_batch_size."
            )
        if not 1 <= self.lanes <= self.base_rows:
            raise InvalidInput(
                f"An epoch of {self.steps} steps cannot be cut into {self.lanes} lanes: "
                f"use 1 to {self.base_rows}, or DataPlan.for_run, which chooses."
            )

    def __reduce__(self) -> tuple[type[DataPlan], tuple[Any, ...]]:
        # Only the fields are pickled, not what was computed from them.
        return DataPlan, tuple(getattr(self, each.name) for each in fields(self))

    @classmethod
    def for_run(
        cls,
        row_groups: Sequence[int],
        global_batch: int,
        seed: int,
        max_workers: int,
        decoded_group_bytes: int,
        budget_bytes: int,
        shuffle: bool = True,
    ) -> DataPlan:
        """The plan of a new run: as many lanes as batch, world and, at W = 1, `budget_bytes` of decoded rows allow."""
        single = cls(tuple(row_groups), global_batch, seed, lanes=1, shuffle=shuffle)
        affordable = count_affordable_lanes(decoded_group_bytes, budget_bytes)
        lanes = min(single.base_rows, MAX_LANES, max(16, 2 * max_workers), affordable)
        return replace(single, lanes=lanes)

    @cached_property
    def rows(self) -> int:
        """N: the rows of an epoch."""
        return sum(self.row_groups)

    @property
    def steps(self) -> int:
        """S: the steps of an epoch."""
        return self.rows // self.global_batch if self.drop_last else -(-self.rows // self.global_batch)

    @property
    def base_rows(self) -> int:
        """q: the rows that every step has."""
        return self.global_batch if self.drop_last else self.rows // self.steps

    @property
    def longer_steps(self) -> int:
        """r: the first so many steps have one row more."""
        return 0 if self.drop_last else self.rows - self.base_rows * self.steps

    def count_step_rows(self, step: int) -> int:
        """n: the rows of a step, over all ranks."""
        self._check_step(step)
        return self.base_rows + (step < self.longer_steps)

    def divide(self, size: int) -> Division:
        """The equal division among `size` ranks."""
        return Division.equal(size, self.shares)

    def count_rows_before(self, step: int) -> int:
        """Rows of the first `step` steps of an epoch."""
        return self.base_rows * step + min(step, self.longer_steps)

    def permute_epoch(self, epoch: int) -> EpochPermutation:
        """The permutation of an epoch, for one thread. Costs a permutation of the row groups."""
        return EpochPermutation(self, epoch)

    @cached_property
    def group_offsets(self) -> Int64s:
        """The global number of each row group's first row."""
        return np.cumsum(self.group_sizes) - self.group_sizes

    @cached_property
    def group_sizes(self) -> Int64s:
        return np.array(self.row_groups, dtype=np.int64)

    @cached_property
    def lane_bounds(self) -> list[tuple[int, int]]:
        """For each lane its rows of a step, as (first, behind the last). The last lane is in longer steps alone."""
        cuts = [lane * self.base_rows // self.lanes for lane in range(self.lanes + 1)]
        return [*pairwise(cuts), (self.base_rows, self.base_rows + 1)]

    def count_equal_steps(self, step: int) -> int:
        """How many consecutive steps from this one on have equally many rows."""
        return (self.longer_steps if step < self.longer_steps else self.steps) - step

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.steps:
            raise InvalidInput(f"Step {step} is not in an epoch of {self.steps} steps.")


class EpochPermutation:
    """The order of one epoch's rows: row groups shuffled, rows shuffled inside each. For one thread.
    Keeps only the permutations of the row groups that lanes are in; lanes in the same row group share it."""

    def __init__(self, plan: DataPlan, epoch: int) -> None:
        self.plan = plan
        self.epoch = epoch
        self._groups = self._draw(len(plan.row_groups))
        self._starts = np.concatenate([[0], np.cumsum(plan.group_sizes[self._groups])])
        self._entered: dict[int, int] = {}  # the row group that each lane is in
        self._permuted: dict[int, Int64s] = {}  # the orders of those

    @property
    def open_groups(self) -> Collection[int]:
        """The row groups that the lanes are in after the last call."""
        return self._permuted.keys()

    def assign_block(self, first: int, count: int, rank: int, division: Division) -> RankBlock:
        """A rank's rows of `count` steps with equally many rows (`DataPlan.count_equal_steps`)."""
        if not 0 <= rank < division.size:
            raise InvalidInput(f"Rank {rank} is not in a world of {division.size}.")
        planned = self.plan.count_step_rows(first)
        start, stop = division.compute_rank_bounds(planned, rank)
        lanes = []
        for lane, (low, high) in enumerate(self.plan.lane_bounds):
            a, b = max(low, start), min(high, stop)
            if a < b:
                runs = self._find_runs(lane, first, count, (a - low, b - low))
                lanes.append(LaneRows(a - start, b - a, runs))
        return RankBlock(first, count, planned, start, stop - start, tuple(lanes))

    def _find_runs(
        self, lane: int, first: int, count: int, taken: tuple[int, int]
    ) -> tuple[tuple[int, Int64s], ...]:
        """A lane's rows of `count` steps. taken: the part of its rows of each step, as (first, behind the last)."""
        low, high = self.plan.lane_bounds[lane]
        width, runs = high - low, []
        begin = at = self.plan.steps * low + first * width  # in the epoch's order
        end = begin + count * width
        slot = int(np.searchsorted(self._starts, at, "right")) - 1
        while at < end:
            past = min(end, int(self._starts[slot + 1]))
            group, origin = int(self._groups[slot]), int(self._starts[slot])
            rows = self._permute_group(lane, group)[at - origin : past - origin]
            if taken != (0, width):  # other ranks take the rows between
                places = np.arange(at - begin, past - begin) % width
                rows = rows[(places >= taken[0]) & (places < taken[1])]
            if len(rows):
                runs.append((group, rows))
            at, slot = past, slot + 1
        return tuple(runs)

    def _draw(self, count: int, *words: int) -> Int64s:
        plan = self.plan
        return draw_permutation(count, plan.seed, self.epoch, *words) if plan.shuffle else np.arange(count)

    def _permute_group(self, lane: int, group: int) -> Int64s:
        left, self._entered[lane] = self._entered.get(lane, group), group
        if left not in self._entered.values():
            self._permuted.pop(left, None)
        if group not in self._permuted:
            self._permuted[group] = self._draw(self.plan.row_groups[group], group)
        return self._permuted[group]
