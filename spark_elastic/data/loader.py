"""The rows of each step, gathered ahead of the training thread.

Owns the prefetch: one background thread a stream that gathers, bounded in steps and bytes, and one that decodes ahead
of it; `close` ends both. What a step takes is the plan's, how a row group is read is the reader's. A stream is used by
one consumer thread; `close` may be called by any.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.clock import SystemClock
from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import DataPlan, EpochPermutation, Int64s, LaneRows, RankBlock
from spark_elastic.data.reading.decoding import ColumnArrays, Reader, nbytes
from spark_elastic.errors import StoreError


class DecodePrefetcher:
    """Lies between a reader and the one thread that fetches, which enters and leaves it as a context."""

    def __init__(self, reader: Reader, most: int, answered: Callable[[], None]) -> None:
        """most: row groups that may lie decoded before they are fetched; with 0 there is no thread.

        answered: called for each row group that was read, by the thread that read it.
        """
        self._reader, self._most, self._answered = reader, most, answered
        self._changed = threading.Condition()
        self._wanted: dict[int, None] = {}  # in the order in which they will be fetched
        self._decoded: set[int] = set()  # of them
        self._releases = 0
        self._full = False  # no room for another, until something is released
        self._stopped = False
        self._thread = threading.Thread(target=self._decode, name="decode-ahead", daemon=True)

    def __enter__(self) -> DecodePrefetcher:
        if self._most:
            try:
                self._thread.start()
            except RuntimeError:  # the system has no thread to give: all is decoded by who fetches
                self._most = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the row group that the thread is at."""
        self.stop()
        if self._most:
            self._thread.join()

    def stop(self) -> None:
        """Nothing more is begun ahead; waits for nothing. Any thread may call it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def ask(self, groups: Iterable[int]) -> None:
        """They will be fetched soon, in this order."""
        if self._most:
            with self._changed:
                self._wanted.update(dict.fromkeys(groups))
                self._wake()

    def fetch(self, group: int) -> ColumnArrays:
        """See `Reader.fetch`. What was not decoded ahead by now is decoded here."""
        if self._most:
            with self._changed:
                self._wanted.pop(group, None)
                self._decoded.discard(group)
                self._wake()
        decoded = self._reader.fetch(group)
        self._answered()
        return decoded

    def release(self, group: int) -> None:
        """See `Reader.release`."""
        self._reader.release(group)
        if self._most:
            with self._changed:
                self._releases += 1
                self._full = False
                self._wake()

    def _decode(self) -> None:
        # Where the store fails, who fetches meets the same, and is there to be told: the rest is left to it.
        with suppress(Exception):
            while (group := self._next()) is not None:
                releases = self._releases
                if self._reader.prefetch(group):
                    self._answered()
                else:
                    self._put_back(group, releases)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._may_go_on())
            if self._stopped:
                return None
            group = next(iter(self._wanted))
            del self._wanted[group]
            self._decoded.add(group)
            return group

    def _put_back(self, group: int, releases: int) -> None:
        """There was no room for it. releases: how many there had been before it was tried."""
        with self._changed:
            if group in self._decoded:  # and was not fetched meanwhile
                self._decoded.remove(group)
                self._wanted = {group: None, **self._wanted}
                self._full = self._releases == releases

    def _wake(self) -> None:
        # Woken for nothing, it would take the interpreter's lock from the thread that gathers.
        if self._may_go_on():
            self._changed.notify()

    def _may_go_on(self) -> bool:
        return bool(self._wanted) and not self._full and len(self._decoded) < self._most


ROWS_AHEAD = 1 << 18  # of which it is known in what row groups they are
BYTES_AHEAD = 16 << 20  # of row groups that lie decoded before they are gathered from; or two
WORTH_A_THREAD = 1 << 20  # bytes of a row group


@dataclass(frozen=True)
class StepRows:
    """One rank's rows of a step: `row_ids` (n_r,) and, for each column, an array (n_r, *shape) of its own memory.

    `planned` is the step's rows over all ranks: what a sum of losses is divided by (R8).
    """

    epoch: int
    step: int
    planned: int
    row_ids: Int64s
    columns: ColumnArrays

    def __len__(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True)
class Prefetch:
    """How far the background thread may run ahead (at least one step), and how long anyone waits for it."""

    steps: int = 64
    bytes: int = 64 << 20
    deadline: float = 300.0  # seconds


class StepLoader:
    """Makes streams of steps over one reader, whose decoded row groups outlive a stream."""

    def __init__(
        self, plan: DataPlan, reader: Reader, columns: Sequence[Column], prefetch: Prefetch | None = None
    ) -> None:
        self.plan = plan
        self._reader = reader
        self._columns = tuple(columns)
        self._prefetch = prefetch or Prefetch()
        self._order: EpochPermutation | None = None

    def steps(self, epoch: int, first_step: int, rank: int, size: int) -> StepStream:
        """The steps `first_step ...` of an epoch as `rank` of `size` sees them; a context that reads ahead inside."""
        # A closed stream gives its order back, so that a resize does not permute everything again.
        order, self._order = self._order, None
        if order is None or order.epoch != epoch:
            order = self.plan.permute_epoch(epoch)
        return StepStream(self, order, first_step, rank, size)

    def gather(
        self,
        epoch: int,
        block: RankBlock,
        fetch: Callable[[int], ColumnArrays],
        release: Callable[[int], None],
    ) -> list[StepRows]:
        """Read the rows of a block in the calling thread. release: called with row groups it needs no more."""
        ids, columns = self._empty(block.count, block.length)
        # A lane's rows lie here on the way to their places in each step: little memory, and always the same.
        widest = max((lane.width for lane in block.lanes), default=0)
        lane_ids, lane_columns = self._empty(block.count * widest)
        left = Counter(block.groups)  # times that each is still to be taken from
        decoded: ColumnArrays = {}
        fetched = -1  # the row group of `decoded`, which two lanes that meet in it share
        for lane in block.lanes:
            taken = 0
            for group, rows in lane.runs:
                if group != fetched:
                    fetched, decoded = group, fetch(group)
                here = slice(taken, taken + len(rows))
                taken += len(rows)
                np.add(rows, self.plan.group_offsets[group], out=lane_ids[here])
                for name, out in lane_columns.items():
                    # In any mode but "raise" it writes to `out` at once.
                    decoded[name].take(rows, axis=0, out=out[here], mode="clip")
                left[group] -= 1
                if not left[group]:
                    release(group)
            _put(lane, lane_ids[:taken], ids)
            for name, out in lane_columns.items():
                _put(lane, out[:taken], columns[name])
        return [
            StepRows(
                epoch,
                block.step + n,
                block.planned,
                ids[n],
                {name: out[n] for name, out in columns.items()},
            )
            for n in range(block.count)
        ]

    def _empty(self, *shape: int) -> tuple[Int64s, ColumnArrays]:
        """Memory for row ids, and for the values of each column, of so many rows."""
        return np.empty(shape, np.int64), {
            column.name: np.empty((*shape, *column.shape), column.dtype) for column in self._columns
        }

    def _finished(self, order: EpochPermutation) -> None:
        self._order = order


def _put(lane: LaneRows, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Rows of a lane, step by step, to their places in each step. out: (steps, rows, ...)"""
    out[:, lane.offset : lane.offset + lane.width] = rows.reshape(len(out), lane.width, *rows.shape[1:])


class _Closed(Exception):
    """Nobody waits for the rest."""


class StepStream:
    """The steps of one rank in one world, in order; `with` starts and ends the thread that reads ahead."""

    def __init__(
        self, loader: StepLoader, order: EpochPermutation, first_step: int, rank: int, size: int
    ) -> None:
        self._loader = loader
        self._order = order
        self._next = first_step
        self._rank, self._size = rank, size
        self._limit = loader._prefetch
        self._row_bytes = 8 + sum(column.row_bytes for column in loader._columns)
        self._any_objects = any(column.dtype == "object" for column in loader._columns)
        self._changed = threading.Condition()
        self._ready: deque[StepRows] = deque()
        self._sizes: deque[int] = deque()  # bytes of each of them
        self._ready_bytes = 0
        self._wish = 0, 0  # steps and bytes of the block that is to be read next
        self._clock = SystemClock()
        self._answered = 0.0  # when the newest row group was there
        self._failed: BaseException | None = None
        self._closed = False
        self._ahead = DecodePrefetcher(loader._reader, self._groups_ahead(), self._note_answer)
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)

    def __enter__(self) -> StepStream:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepRows]:
        return self

    def __next__(self) -> StepRows:
        """The next step's rows; StoreError where no row group comes in time, the reader's own error where it failed."""
        if self._next >= self._loader.plan.steps:
            raise StopIteration
        with self._changed:
            self._await_rows()
            if self._closed:
                raise StoreError("This stream of steps is closed: ask the loader for a new one.")
            if not self._ready:
                assert self._failed is not None
                raise self._failed
            rows = self._ready.popleft()
            self._ready_bytes -= self._sizes.popleft()
            # Woken at each step, the thread would take the interpreter's lock from a step's computing for nothing.
            if self._fits():
                self._changed.notify_all()
        self._next += 1
        return rows

    def _await_rows(self) -> None:
        """Until the next step is there, or nothing will come. A large step of many row groups may take longer than
        anyone would wait for a silent store, which is what `deadline` is for."""
        since = self._clock.now()
        while not (self._ready or self._failed or self._closed):
            left = max(since, self._answered) + self._limit.deadline - self._clock.now()
            if left <= 0:
                raise StoreError(
                    f"The rows of step {self._next} of epoch {self._order.epoch} did not come: the store has not "
                    f"answered for {self._limit.deadline:g} s."
                )
            self._changed.wait(left)

    def close(self) -> None:
        """End the thread and wait for it (for the row group it is in); free a waiting consumer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._ahead.stop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(self._limit.deadline)
            if self._thread.is_alive():
                raise StoreError(
                    f"A read of the store did not end within {self._limit.deadline:g} s: the store does not answer."
                )
        self._ready.clear()
        self._loader._finished(self._order)

    def _read_ahead(self) -> None:
        with self._ahead:
            try:
                self._gather_all()
            except _Closed:
                pass
            except BaseException as error:  # raised again in the consumer's thread
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
        self._loader._reader.release()

    def _gather_all(self) -> None:
        blocks, coming = self._blocks(), deque[RankBlock]()
        uses: Counter[int] = Counter()  # of each row group, in the blocks that are coming

        def release(group: int) -> None:
            if not uses[group] and not (coming and group in self._order.open_groups):
                del uses[group]
                self._ahead.release(group)

        while True:
            known = sum(block.count * block.length for block in coming)
            for block in islice(blocks, 2 if known < ROWS_AHEAD else 1):
                coming.append(block)
                self._ahead.ask(group for group in block.groups if group not in uses)
                uses.update(block.groups)
            if not coming:
                return
            block = coming.popleft()
            uses.subtract(block.groups)
            self._wait_for_room(block.count, block.count * self._most(block.step))
            gathered = self._loader.gather(self._order.epoch, block, self._fetched, release)
            sizes = self._weighed(gathered)
            with self._changed:
                self._ready.extend(gathered)
                self._sizes.extend(sizes)
                self._ready_bytes += sum(sizes)
                self._changed.notify_all()

    def _fetched(self, group: int) -> ColumnArrays:
        decoded = self._ahead.fetch(group)
        if self._closed:
            raise _Closed
        return decoded

    def _note_answer(self) -> None:
        self._answered = self._clock.now()

    def _blocks(self) -> Iterator[RankBlock]:
        """This rank's rows of all steps, in blocks of steps that grow: the first step comes soon."""
        plan, step, count = self._loader.plan, self._next, 1
        while step < plan.steps:
            room = self._limit.bytes // 2 // self._most(step)
            count = max(1, min(count, plan.count_equal_steps(step), self._limit.steps // 2, room))
            yield self._order.block(step, count, self._rank, self._size)
            step += count
            count *= 2

    def _groups_ahead(self) -> int:
        """How many row groups to decode ahead. Of small ones none: for threads to take turns would cost more."""
        plan = self._loader.plan
        usual = plan.rows * self._row_bytes // len(plan.row_groups)
        return max(2, BYTES_AHEAD // usual) if usual >= WORTH_A_THREAD else 0

    def _most(self, step: int) -> int:
        """Bytes of a rank's rows of a step; the longest share comes first."""
        return self._bytes(-(-self._loader.plan.step_size(step) // self._size))

    def _wait_for_room(self, steps: int, wanted: int) -> None:
        """Only `close` ends a slow consumer's wait."""
        with self._changed:
            self._wish = steps, wanted
            self._changed.wait_for(lambda: self._closed or self._fits())
            if self._closed:
                raise _Closed

    def _fits(self) -> bool:
        """Whether there is room for what is to be read next."""
        steps, wanted = self._wish
        return not self._ready or (
            len(self._ready) + steps <= self._limit.steps and self._ready_bytes + wanted <= self._limit.bytes
        )

    def _weighed(self, gathered: list[StepRows]) -> list[int]:
        """Bytes of each. How long bytes and strings are is known once they are there: the next ones are like them."""
        if not self._any_objects:
            return [self._bytes(len(rows)) for rows in gathered]
        sizes = [rows.row_ids.nbytes + nbytes(rows.columns) for rows in gathered]
        most = max(size // max(1, len(rows)) for size, rows in zip(sizes, gathered, strict=True))
        self._row_bytes = max(self._row_bytes, most)
        return sizes

    def _bytes(self, rows: int) -> int:
        return rows * self._row_bytes
