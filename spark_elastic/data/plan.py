"""Which rows a step of an epoch takes, and which of them a rank takes: arithmetic, pure.

Owns the order of an epoch and its cut into lanes, steps and shares (docs/protocol.md, "The data plan, exactly").
Knows no file, no column and no thread; progress is the step's number alone. `DataPlan` is a value. `EpochOrder`
keeps permutations and belongs to the one thread that uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
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


def permutation(length: int, *words: int) -> Int64s:
    """A permutation of `range(length)` that depends on `words` alone, the same in every version and on every machine.

    The argsort of the first `length` outputs of SplitMix64 (Steele, Lea, Flood 2014), seeded by absorbing the words
    one by one. Outputs of one stream are all different (odd increment, bijective mix), so that no two sorting
    algorithms can disagree.
    """
    counters = np.arange(1, length + 1, dtype=np.uint64)
    keys = _mixed(np.uint64(_seeded(words)) + counters * np.uint64(_GOLDEN))
    return np.argsort(keys).astype(np.int64, copy=False)


def draws(rows: Int64s, count: int, *words: int) -> npt.NDArray[np.float64]:
    """(rows, count) numbers in [0, 1) that depend on each row's number and `words` alone, as `permutation` does."""
    seeds = _mixed(np.uint64(_seeded(words)) + rows.astype(np.uint64) * np.uint64(_GOLDEN))
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mixed(seeds[:, None] + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _seeded(words: Sequence[int]) -> int:
    state = 0
    for word in words:
        absorbed = np.array([(state + word + _GOLDEN) & _WORD], dtype=np.uint64)
        state = int(_mixed(absorbed)[0])
    return state


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class RankRows:
    """One rank's rows of one step, in the step's order.

    `groups[j]` is the row group and `rows[j]` the row inside it. The share is rows `start ... start + len(rows)` of
    the step's `planned` rows.
    """

    step: int
    planned: int
    start: int
    groups: Int64s
    rows: Int64s

    def __len__(self) -> int:
        return len(self.rows)


def together(groups: Int64s) -> list[tuple[int, Int64s]]:
    """Each row group that is named, with the places where it is, in ascending order."""
    if not len(groups):
        return []
    # Numpy sorts numbers of 16 bits in linear time, and wider ones by comparing them.
    short = int(groups.max()) < 1 << 16
    by_group = np.argsort(groups.astype(np.uint16) if short else groups, kind="stable")
    ordered = groups[by_group]
    cuts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    return [(int(ordered[a]), by_group[a:b]) for a, b in pairwise(cuts)]


@dataclass(frozen=True)
class DataPlan:
    """The rows of every step of every epoch. All of its fields stay as they are for the whole run (R19).

    `row_groups`: rows of each row group, in the manifest's order; `global_batch`: the most rows a step may take;
    `lanes`: streams that an epoch is cut into. With `shuffle=False` groups and rows keep the manifest's order.
    """

    row_groups: tuple[int, ...]
    global_batch: int
    seed: int
    lanes: int
    shuffle: bool = True
    _last: list[EpochOrder] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InvalidInput(f"The global batch is {self.global_batch}: it must have at least 1 row.")
        if any(rows < 0 for rows in self.row_groups):
            raise InvalidInput(f"A row group has {min(self.row_groups)} rows: the manifest is damaged.")
        if self.rows < 1:
            raise InvalidInput("There are no rows to train on: the data set is empty.")
        if not 1 <= self.lanes <= self.base_rows:
            raise InvalidInput(
                f"An epoch of {self.steps} steps cannot be cut into {self.lanes} lanes: "
                f"use 1 to {self.base_rows}, or DataPlan.for_run, which chooses."
            )

    def __reduce__(self) -> tuple[type[DataPlan], tuple[Any, ...]]:
        # A value travels without what was computed from it.
        return DataPlan, (self.row_groups, self.global_batch, self.seed, self.lanes, self.shuffle)

    @classmethod
    def for_run(
        cls,
        row_groups: Sequence[int],
        global_batch: int,
        seed: int,
        max_workers: int,
        decoded_bytes_per_group: int,
        budget_bytes: int,
        shuffle: bool = True,
    ) -> DataPlan:
        """The plan of a new run: as many lanes as batch, world and memory allow.

        At W = 1 a rank has every lane's row group open, hence the budget: `budget_bytes` of decoded rows, of which
        one row group takes `decoded_bytes_per_group`.
        """
        single = cls(tuple(row_groups), global_batch, seed, lanes=1, shuffle=shuffle)
        affordable = budget_bytes // max(1, decoded_bytes_per_group)
        lanes = min(single.base_rows, MAX_LANES, max(16, 2 * max_workers), max(1, affordable))
        return cls(single.row_groups, global_batch, seed, lanes, shuffle)

    @cached_property
    def rows(self) -> int:
        """N: the rows of an epoch."""
        return sum(self.row_groups)

    @property
    def steps(self) -> int:
        """S: the steps of an epoch."""
        return -(-self.rows // self.global_batch)

    @property
    def base_rows(self) -> int:
        """q: the rows that every step has."""
        return self.rows // self.steps

    @property
    def longer_steps(self) -> int:
        """r: the first so many steps have one row more."""
        return self.rows - self.base_rows * self.steps

    def step_size(self, step: int) -> int:
        """n: the rows of a step, over all ranks."""
        self._check_step(step)
        return self.base_rows + (step < self.longer_steps)

    def rows_before(self, step: int) -> int:
        """Rows of the first `step` steps of an epoch."""
        return self.base_rows * step + min(step, self.longer_steps)

    def order(self, epoch: int) -> EpochOrder:
        """A new order of an epoch, for one thread. Costs a permutation of the row groups."""
        return EpochOrder(self, epoch)

    def share(self, epoch: int, step: int, rank: int, size: int) -> RankRows:
        """The rows of `rank` in a step of a world of `size` ranks; the last epoch's order is kept, for one thread."""
        if not self._last or self._last[0].epoch != epoch:
            self._last[:] = [self.order(epoch)]
        return self._last[0].share(step, rank, size)

    def row_ids(self, share: RankRows) -> Int64s:
        """The global number of each row of a share: its place in the table of the manifest."""
        return self.group_offsets[share.groups] + share.rows

    @cached_property
    def group_offsets(self) -> Int64s:
        """The global number of each row group's first row."""
        return _starts(np.asarray(self.row_groups, dtype=np.int64))

    @cached_property
    def lane_steps(self) -> tuple[Int64s, Int64s]:
        """For each of the q places of a step: where in the epoch's order step 0 reads, and how far a step moves it."""
        places = np.arange(self.base_rows, dtype=np.int64)
        cuts = np.arange(self.lanes + 1, dtype=np.int64) * self.base_rows // self.lanes
        lane = np.searchsorted(cuts, places, side="right") - 1
        first = self.steps * cuts[lane] + (places - cuts[lane])
        return first, np.diff(cuts)[lane]

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.steps:
            raise InvalidInput(f"Step {step} is not in an epoch of {self.steps} steps.")


class EpochOrder:
    """The order of one epoch's rows: row groups shuffled, rows shuffled inside each, lazily. For one thread.

    Keeps the permutations of the row groups that a rank with all lanes has open at a time, and no more.
    """

    def __init__(self, plan: DataPlan, epoch: int) -> None:
        self.plan = plan
        self.epoch = epoch
        count = len(plan.row_groups)
        self._groups = permutation(count, plan.seed, epoch) if plan.shuffle else np.arange(count)
        self._starts = _starts(np.asarray(plan.row_groups, dtype=np.int64)[self._groups])
        self._permuted: OrderedDict[int, Int64s] = OrderedDict()
        self._kept = 2 * plan.lanes + 2

    def share(self, step: int, rank: int, size: int) -> RankRows:
        """The rows that `rank` of `size` takes in a step: places floor(n·rank/size) to floor(n·(rank+1)/size)."""
        return self.shares(step, 1, rank, size)[0]

    def shares(self, first: int, count: int, rank: int, size: int) -> list[RankRows]:
        """The same of `count` steps, worked out together: a step alone has few rows of each row group."""
        if not 0 <= rank < size:
            raise InvalidInput(f"Rank {rank} is not in a world of {size}.")
        sizes = [self.plan.step_size(step) for step in range(first, first + count)]
        spans = [(planned * rank // size, planned * (rank + 1) // size) for planned in sizes]
        places = np.concatenate([self._places(first + number, *span) for number, span in enumerate(spans)])
        slots = np.searchsorted(self._starts, places, side="right") - 1
        groups, rows = self._groups[slots], places - self._starts[slots]
        if self.plan.shuffle:
            for group, where in together(groups):
                rows[where] = self._rows_of(group)[rows[where]]
        ends = np.cumsum([0, *(stop - start for start, stop in spans)]).tolist()
        return [
            RankRows(first + number, planned, spans[number][0], groups[a:b], rows[a:b])
            for number, (planned, (a, b)) in enumerate(zip(sizes, pairwise(ends), strict=True))
        ]

    def _places(self, step: int, start: int, stop: int) -> Int64s:
        """Where in the epoch's order the places `start ... stop` of a step are."""
        first, move = self.plan.lane_steps
        places = first[start:stop] + step * move[start:stop]
        if stop > self.plan.base_rows and stop > start:
            places = np.append(places, self.plan.steps * self.plan.base_rows + step)
        return places

    def _rows_of(self, group: int) -> Int64s:
        rows = self._permuted.get(group)
        if rows is None:
            rows = permutation(self.plan.row_groups[group], self.plan.seed, self.epoch, group)
            self._permuted[group] = rows
            if len(self._permuted) > self._kept:
                self._permuted.popitem(last=False)
        self._permuted.move_to_end(group)
        return rows


def _starts(sizes: Int64s) -> Int64s:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]])
