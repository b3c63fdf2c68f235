"""The rows of each step, gathered ahead of the training thread.

Owns the prefetch: one background thread a stream, bounded in steps and bytes, ended by `close`. What a step takes
is the plan's, how a row group is read is the reader's. A stream is used by one consumer thread; `close` may be
called by any.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType

import numpy as np

from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import DataPlan, EpochOrder, Int64s, RankRows, together
from spark_elastic.data.reading.decoding import nbytes
from spark_elastic.data.reading.reader import Decoded, Reader
from spark_elastic.errors import StoreError

WIDE = 1024  # bytes of a row, from which on to put each in its place costs less than a second copy of all


@dataclass(frozen=True)
class StepRows:
    """One rank's rows of a step: `row_ids` (n_r,) and, for each column, an array (n_r, *shape) of its own memory.

    `planned` is the step's rows over all ranks: what a sum of losses is divided by (R8).
    """

    epoch: int
    step: int
    planned: int
    row_ids: Int64s
    columns: Decoded

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
        self._order: EpochOrder | None = None

    def steps(self, epoch: int, first_step: int, rank: int, size: int) -> StepStream:
        """The steps `first_step ...` of an epoch as `rank` of `size` sees them; a context that reads ahead inside."""
        # A closed stream gives its order back, so that a resize does not permute everything again.
        order, self._order = self._order, None
        if order is None or order.epoch != epoch:
            order = self.plan.order(epoch)
        return StepStream(self, order, first_step, rank, size)

    def gather(
        self, order: EpochOrder, shares: Sequence[RankRows], answered: Callable[[], None]
    ) -> list[StepRows]:
        """Read the rows of shares in the calling thread; those of all steps that lie in one row group at once.
        answered: called behind each row group; what it raises ends the reading."""
        groups = np.concatenate([share.groups for share in shares])
        rows = np.concatenate([share.rows for share in shares])
        parts = together(groups)
        back = np.empty(len(rows), np.int64)
        if parts:
            back[np.concatenate([where for _, where in parts])] = np.arange(len(rows))
        columns: Decoded = {c.name: np.empty((len(rows), *c.shape), dtype=c.dtype) for c in self._columns}
        wide = {c.name for c in self._columns if c.row_bytes >= WIDE}
        first = 0
        for group, where in parts:
            decoded, past = self._reader.fetch(group), first + len(where)
            answered()
            wanted = rows[where]
            for name, out in columns.items():
                if name in wide:
                    out[where] = decoded[name][wanted]
                else:
                    # "clip" writes into `out` directly, "raise" by way of a buffer; the plan's rows are in range.
                    decoded[name].take(wanted, axis=0, out=out[first:past], mode="clip")
            first = past
        placed = {n: array if n in wide else array.take(back, axis=0) for n, array in columns.items()}
        return self._in_steps(order, shares, placed)

    def _in_steps(self, order: EpochOrder, shares: Sequence[RankRows], columns: Decoded) -> list[StepRows]:
        ends = np.cumsum([0, *map(len, shares)]).tolist()
        return [
            StepRows(
                order.epoch,
                share.step,
                share.planned,
                self.plan.row_ids(share),
                {name: array[a:b] for name, array in columns.items()},
            )
            for share, (a, b) in zip(shares, pairwise(ends), strict=True)
        ]

    def _finished(self, order: EpochOrder) -> None:
        self._order = order


class _Closed(Exception):
    """Nobody waits for the rest."""


class StepStream:
    """The steps of one rank in one world, in order; `with` starts and ends the thread that reads ahead."""

    def __init__(self, loader: StepLoader, order: EpochOrder, first_step: int, rank: int, size: int) -> None:
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
        self._answers = 0  # row groups that were read
        self._failed: BaseException | None = None
        self._closed = False
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
            while not self._came():
                moved = partial(self._moved, self._answers)
                if not self._changed.wait_for(moved, self._limit.deadline):
                    raise StoreError(
                        f"The rows of step {self._next} of epoch {self._order.epoch} did not come: the store has not "
                        f"answered for {self._limit.deadline:g} s."
                    )
            if self._closed:
                raise StoreError("This stream of steps is closed: ask the loader for a new one.")
            if not self._ready:
                assert self._failed is not None
                raise self._failed
            rows = self._ready.popleft()
            self._ready_bytes -= self._sizes.popleft()
            self._changed.notify_all()
        self._next += 1
        return rows

    def _came(self) -> bool:
        return bool(self._ready or self._failed or self._closed)

    def _moved(self, answers: int) -> bool:
        return self._came() or self._answers > answers

    def close(self) -> None:
        """End the thread and wait for it (for the row group it is in); free a waiting consumer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(self._limit.deadline)
            if self._thread.is_alive():
                raise StoreError(
                    f"A read of the store did not end within {self._limit.deadline:g} s: the store does not answer."
                )
        self._ready.clear()
        self._loader._finished(self._order)

    def _read_ahead(self) -> None:
        plan, step, count = self._loader.plan, self._next, 1
        try:
            while step < plan.steps:
                count = min(count, plan.steps - step)
                # The longest share comes first.
                most = self._bytes(-(-plan.step_size(step) // self._size))
                count = max(1, min(count, self._limit.steps // 2, self._limit.bytes // 2 // most))
                if not self._room(count, count * most):
                    return
                shares = self._order.shares(step, count, self._rank, self._size)
                gathered = self._loader.gather(self._order, shares, self._answered)
                sizes = self._weighed(gathered)
                with self._changed:
                    self._ready.extend(gathered)
                    self._sizes.extend(sizes)
                    self._ready_bytes += sum(sizes)
                    self._changed.notify_all()
                step += count
                count *= 2  # the first step comes soon
        except _Closed:
            return
        except BaseException as error:  # raised again in the consumer's thread
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _answered(self) -> None:
        """A large step of many row groups may take longer than anyone would wait for a silent store."""
        with self._changed:
            if self._closed:
                raise _Closed
            self._answers += 1
            self._changed.notify_all()

    def _room(self, steps: int, wanted: int) -> bool:
        """Wait until they fit; False once the stream is closed. Only `close` ends a slow consumer's wait."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or not self._ready
                    or (
                        len(self._ready) + steps <= self._limit.steps
                        and self._ready_bytes + wanted <= self._limit.bytes
                    )
                )
            )
            return not self._closed

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
