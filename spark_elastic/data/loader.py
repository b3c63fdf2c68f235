"""The rows of each step, gathered ahead of the training thread.

A stream has two background threads: one gathers the rows of the next steps, bounded in steps and bytes; one decodes row
groups ahead of it (Arrow and numpy both release the interpreter's lock). `close` ends both. Which rows a step takes is
the plan's; how a row group is read is the reader's. One consumer thread uses a stream; any thread may `close` it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.clock import SystemClock
from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import ALONE, DataPlan, Division, EpochPermutation, Int64s, LaneRows, RankBlock
from spark_elastic.data.reading.decoding import ColumnArrays, nbytes
from spark_elastic.data.reading.group_reader import Reader
from spark_elastic.errors import StoreError

ROWS_AHEAD = 1 << 18  # rows whose row groups are announced to the decoding thread
BYTES_AHEAD = 16 << 20  # of row groups that are decoded in advance; at least two row groups
MIN_GROUP_BYTES_FOR_THREAD = 1 << 20  # for smaller row groups a decoding thread costs more than it saves


@dataclass(frozen=True)
class StepRows:
    """One rank's rows of a step, in memory of their own."""

    epoch: int  # from 0
    step: int  # of the epoch, from 0
    planned: int  # rows of the step over all ranks, by which the sum of losses is divided (R8, weighting)
    row_ids: Int64s  # (n,) the global number of each row
    columns: ColumnArrays  # column -> (n, *shape)
    division: Division = ALONE  # how all ranks divide the step

    def __len__(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True)
class Prefetch:
    """How far the gathering thread may run ahead, and how long the consumer waits for it."""

    steps: int = 64  # steps that are gathered and not consumed yet, at most
    bytes: int = 64 << 20  # of these steps, at most; a step that alone has more is gathered all the same
    deadline: float = 300.0  # seconds without an answer from the store


class StepLoader:
    """Makes streams of steps over one reader, whose decoded row groups outlive a stream."""

    def __init__(
        self, plan: DataPlan, reader: Reader, columns: Sequence[Column], prefetch: Prefetch | None = None
    ) -> None:
        self.plan = plan
        self._reader = reader
        self._columns = tuple(columns)
        self._prefetch = prefetch or Prefetch()
        # What streams leave here: a closed one its permutation, so that a resize does not permute everything again; and
        # itself one at the end of its epoch, which reads the beginning of the next one.
        self.order: EpochPermutation | None = None
        self.waiting: StepStream | None = None

    def steps(
        self, epoch: int, first: int, rank: int, size: int, division: Division | None = None, epochs: int = 0
    ) -> StepStream:
        """The steps `first ...` of an epoch as `rank` of `size` sees them; a context that reads ahead inside.

        division: how the ranks divide each step; None: equally. epochs: of the training; before the last of them the
        stream reads on, and is that of the next epoch as well if rank and division stay. 0: it ends with its epoch.
        """
        division = division or self.plan.divide(size)
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            if waiting.begin_epoch(epoch, first, rank, division):
                return waiting
            waiting.close()
        order, self.order = self.order, None
        if order is None or order.epoch != epoch:
            order = self.plan.permute_epoch(epoch)
        return StepStream(self, order, first, rank, division, epochs)

    def close(self) -> None:
        """End a stream that reads ahead between two epochs."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.close()

    def gather(
        self,
        epoch: int,
        block: RankBlock,
        division: Division,
        fetch: Callable[[int], ColumnArrays],
        release: Callable[[int], None],
    ) -> list[StepRows]:
        """Read the rows of a block in the calling thread. release: called with each row group once it is done with."""
        ids, columns = self._empty(block.count, block.length)
        # A lane's rows are gathered here, then copied to their places in each step.
        widest = max((lane.width for lane in block.lanes), default=0)
        lane_ids, lane_columns = self._empty(block.count * widest)
        left = Counter(block.groups)  # how often each row group is still read from
        decoded: ColumnArrays = {}
        fetched = -1  # the row group of `decoded`: two lanes may read from the same one
        for lane in block.lanes:
            taken = 0
            for group, rows in lane.runs:
                if group != fetched:
                    fetched, decoded = group, fetch(group)
                part = slice(taken, taken + len(rows))
                taken += len(rows)
                np.add(rows, self.plan.group_offsets[group], out=lane_ids[part])
                for name, out in lane_columns.items():
                    # In mode "raise" numpy would write to a buffer first.
                    decoded[name].take(rows, axis=0, out=out[part], mode="clip")
                left[group] -= 1
                if not left[group]:
                    release(group)
            _put(lane, lane_ids[:taken], ids)
            for name, out in lane_columns.items():
                _put(lane, out[:taken], columns[name])
        steps = []
        for n in range(block.count):
            own = {name: out[n] for name, out in columns.items()}
            steps.append(StepRows(epoch, block.step + n, block.planned, ids[n], own, division))
        return steps

    def _empty(self, *shape: int) -> tuple[Int64s, ColumnArrays]:
        return np.empty(shape, np.int64), {
            column.name: np.empty((*shape, *column.shape), column.dtype) for column in self._columns
        }


def _put(lane: LaneRows, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Copy rows of a lane to their places in each step. out: (steps, rows, ...)"""
    out[:, lane.offset : lane.offset + lane.width] = rows.reshape(len(out), lane.width, *rows.shape[1:])


class _Closed(Exception):
    """The stream was closed: the gathering thread ends."""


class StepStream:
    """The steps of one rank in one world and epoch, in order; `with` starts and ends the thread that reads ahead, which
    goes on with the next epoch, if there is one, once all steps are taken."""

    def __init__(
        self,
        loader: StepLoader,
        order: EpochPermutation,
        step: int,
        rank: int,
        division: Division,
        epochs: int,
    ) -> None:
        self._loader = loader
        self._orders = {order.epoch: order}  # the consumer's, and the next one once the thread reads it
        self._epoch, self._epochs = order.epoch, epochs
        self._next = step
        self._rank, self._division = rank, division
        self._limit = loader._prefetch
        self._row_bytes = 8 + sum(column.row_bytes for column in loader._columns)
        self._any_objects = any(column.dtype == "object" for column in loader._columns)
        self._changed = threading.Condition()
        self._ready: deque[StepRows] = deque()
        self._sizes: deque[int] = deque()  # bytes of each of them
        self._ready_bytes = 0
        self._next_block = 0, 0  # steps and bytes of the block that is read next
        self._clock = SystemClock()
        self._last_read = 0.0  # when a row group was read last
        self._failed: BaseException | None = None
        self._closed = False
        usual = loader.plan.rows * self._row_bytes // len(loader.plan.row_groups)
        groups_ahead = max(2, BYTES_AHEAD // usual) if usual >= MIN_GROUP_BYTES_FOR_THREAD else 0
        self._ahead = DecodePrefetcher(loader._reader, groups_ahead, self._note_answer)
        work = partial(self._read_ahead, order.epoch, step)
        self._thread = threading.Thread(target=work, name="read-ahead", daemon=True)

    def __enter__(self) -> StepStream:
        if self._thread.ident is None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None and self._next >= self._loader.plan.steps and self._epoch + 1 < self._epochs:
            self._loader.waiting = self
        else:
            self.close()

    def begin_epoch(self, epoch: int, first_step: int, rank: int, division: Division) -> bool:
        """Go on with that epoch; False if the thread has read other rows ahead."""
        if (epoch, first_step, rank, division) != (self._epoch + 1, 0, self._rank, self._division):
            return False
        self._orders.pop(self._epoch, None)
        self._epoch, self._next = epoch, 0
        return True

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
            # Waking the thread at each step would take the interpreter's lock from the computation.
            if self._has_room():
                self._changed.notify_all()
        self._next += 1
        return rows

    def is_ready(self) -> bool:
        """Whether the next step's rows are there, so that `next` does not wait."""
        return bool(self._ready)

    def _await_rows(self) -> None:
        """Wait until the next step is there. `deadline` counts from the last row group: a step may have many."""
        since = self._clock.now()
        while not (self._ready or self._failed or self._closed):
            left = max(since, self._last_read) + self._limit.deadline - self._clock.now()
            if left <= 0:
                raise StoreError(
                    f"The rows of step {self._next} of epoch {self._epoch + 1} did not come: the store has not "
                    f"answered for {self._limit.deadline:g} s."
                )
            self._changed.wait(left)

    def close(self) -> None:
        """End the threads, wait until they have finished their row groups, and free a waiting consumer."""
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
        self._loader.order = self._orders.get(self._epoch)

    def _read_ahead(self, epoch: int, first_step: int) -> None:
        with self._ahead:
            try:
                self._gather_epoch(epoch, first_step)
                for following in range(epoch + 1, self._epochs):
                    self._loader._reader.release()
                    self._orders[following] = self._loader.plan.permute_epoch(following)
                    self._gather_epoch(following, 0)
            except _Closed:
                pass
            except BaseException as error:  # raised again in the consumer's thread
                with self._changed:
                    self._failed = error
                    self._changed.notify_all()
        self._loader._reader.release()

    def _gather_epoch(self, epoch: int, first_step: int) -> None:
        order = self._orders[epoch]
        blocks, coming = self._iter_blocks(order, first_step), deque[RankBlock]()
        uses: Counter[int] = Counter()  # how often the coming blocks use each row group

        def release(group: int) -> None:
            if not uses[group] and not (coming and group in order.open_groups):
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
            self._wait_for_room(block.count, block.count * self._count_step_bytes(block.step))
            gathered = self._loader.gather(epoch, block, self._division, self._fetch, release)
            sizes = self._measure(gathered)
            with self._changed:
                self._ready.extend(gathered)
                self._sizes.extend(sizes)
                self._ready_bytes += sum(sizes)
                self._changed.notify_all()

    def _fetch(self, group: int) -> ColumnArrays:
        decoded = self._ahead.fetch(group)
        if self._closed:
            raise _Closed
        return decoded

    def _note_answer(self) -> None:
        self._last_read = self._clock.now()

    def _iter_blocks(self, order: EpochPermutation, first_step: int) -> Iterator[RankBlock]:
        """This rank's rows of all steps, in blocks of steps: for one step alone each take of few rows would be a call.
        Blocks double, so that the first step comes soon."""
        plan, step, count = self._loader.plan, first_step, 1
        while step < plan.steps:
            room = self._limit.bytes // 2 // self._count_step_bytes(step)
            count = max(1, min(count, plan.count_equal_steps(step), self._limit.steps // 2, room))
            yield order.assign_block(step, count, self._rank, self._division)
            step += count
            count *= 2

    def _count_step_bytes(self, step: int) -> int:
        first, past = self._division.compute_rank_bounds(self._loader.plan.count_step_rows(step), self._rank)
        return max(1, (past - first) * self._row_bytes)

    def _wait_for_room(self, steps: int, wanted: int) -> None:
        with self._changed:
            self._next_block = steps, wanted
            self._changed.wait_for(lambda: self._closed or self._has_room())
            if self._closed:
                raise _Closed

    def _has_room(self) -> bool:
        steps, wanted = self._next_block
        return not self._ready or (
            len(self._ready) + steps <= self._limit.steps and self._ready_bytes + wanted <= self._limit.bytes
        )

    def _measure(self, gathered: list[StepRows]) -> list[int]:
        """Bytes of each step. The lengths of strings become known here, and are assumed for the next rows."""
        if not self._any_objects:
            return [len(rows) * self._row_bytes for rows in gathered]
        sizes = [rows.row_ids.nbytes + nbytes(rows.columns) for rows in gathered]
        most = max(size // max(1, len(rows)) for size, rows in zip(sizes, gathered, strict=True))
        self._row_bytes = max(self._row_bytes, most)
        return sizes


class DecodePrefetcher:
    """Decodes row groups in a thread of its own before the one thread that fetches, which enters it, asks for them."""

    def __init__(self, reader: Reader, most: int, on_read: Callable[[], None]) -> None:
        """most: row groups decoded ahead; 0: no thread. on_read: called after each read, by the thread that read."""
        self._reader, self._most, self._on_read = reader, most, on_read
        self._changed = threading.Condition()
        self._wanted: dict[int, None] = {}  # ordered set: they will be fetched in this order
        self._decoded: set[int] = set()  # decoded, not fetched yet
        self._releases = 0
        self._full = False  # no room for another row group until one is released
        self._stopped = False
        self._thread = threading.Thread(target=self._decode, name="decode-ahead", daemon=True)

    def __enter__(self) -> DecodePrefetcher:
        if self._most:
            try:
                self._thread.start()
            except RuntimeError:  # the system refuses a thread: the fetching thread decodes
                self._most = 0
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        if self._most:
            self._thread.join()

    def stop(self) -> None:
        """Begin no further row group; does not wait. Any thread may call it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def ask(self, groups: Iterable[int]) -> None:
        coming = dict.fromkeys(groups)
        self._reader.announce(coming)
        if self._most:
            with self._changed:
                self._wanted.update(coming)
                self._wake()

    def fetch(self, group: int) -> ColumnArrays:
        """A row group that is not decoded yet is decoded here."""
        if self._most:
            with self._changed:
                self._wanted.pop(group, None)
                self._decoded.discard(group)
                self._wake()
        decoded = self._reader.fetch(group)
        self._on_read()
        return decoded

    def release(self, group: int) -> None:
        self._reader.release(group)
        if self._most:
            with self._changed:
                self._releases += 1
                self._full = False
                self._wake()

    def _decode(self) -> None:
        # If the store fails, the fetching thread gets the same error and raises it.
        with suppress(Exception):
            while (group := self._next()) is not None:
                releases = self._releases
                if self._reader.prefetch(group):
                    self._on_read()
                else:
                    self._put_back(group, releases)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._can_decode())
            if self._stopped:
                return None
            group = next(iter(self._wanted))
            del self._wanted[group]
            self._decoded.add(group)
            return group

    def _put_back(self, group: int, releases: int) -> None:
        """Keep a row group for which there was no room. releases: their number before it was tried."""
        with self._changed:
            if group in self._decoded:  # not fetched in the meantime
                self._decoded.remove(group)
                self._wanted = {group: None, **self._wanted}
                self._full = self._releases == releases

    def _wake(self) -> None:
        # Waking it for nothing would take the interpreter's lock from the gathering thread.
        if self._can_decode():
            self._changed.notify()

    def _can_decode(self) -> bool:
        return bool(self._wanted) and not self._full and len(self._decoded) < self._most
