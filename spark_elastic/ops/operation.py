"""Carries out operations on a group, in the order that all ranks decided. The channel's thread only.

Small reductions of one kind that are due together travel as one: the same ones on every rank, since what is due is the
same everywhere.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from elastic_collectives import CollectiveError, Group
from elastic_collectives.arithmetic import narrow
from elastic_collectives.group import Array
from elastic_collectives.operands import as_array, as_reduction, as_rows, validate_root, validate_splits
from spark_elastic.clock import Clock
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.negotiation import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    REDUCESCATTER,
    Request,
)

# One operation of one rank: its arrays, and the handle by which its result is waited for.
#
# The channel's thread settles it, any other may wait. Nothing here knows how it is carried out.


POLLED_AGAIN = 0.5  # seconds: who asks more rarely has other things to do meanwhile


@dataclass(frozen=True)
class CompletionSignal:
    """What the handles of a channel share. waiting: entered around a wait for other processes."""

    clock: Clock
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    condition: threading.Condition = field(default_factory=threading.Condition)


class Operation:
    """A handle. `outputs` once done: for allreduce and broadcast the arrays themselves, changed in place; allgather and
    reducescatter one new array for each; alltoall the rows received, and how many came from each rank."""

    def __init__(
        self,
        request: Request,
        arrays: Sequence[Array],
        desk: CompletionSignal,
        progress: Callable[[Operation], None],
        splits: list[int] | None = None,
    ) -> None:
        self.request = request
        self.arrays = tuple(arrays)
        self.splits = splits
        self.label = request.name or f"unnamed {request.kind}"
        self.requested_at = desk.clock.now()
        self.announced_at = self.requested_at
        self.outputs: tuple[Array, ...] = ()
        self._signal = desk
        self._progress = progress
        self._wait_began_at: float | None = None
        self._polled_at: float | None = None  # last
        self._has_blocked_thread = False
        self._done = False
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._done

    def wait(self) -> tuple[Array, ...]:
        """Wait until it is done, driving rounds meanwhile. The channel's deadlines bound the wait.

        Raises:
            CollectiveError: it failed, or the world broke. Any other: this rank itself could not carry it out.
        """
        if not self._done:
            self._has_blocked_thread = True
            self._wait_began_at = self._wait_began_at or self._signal.clock.now()
            with self._signal.waiting():
                self._progress(self)
        if self._error is not None:
            reraise(self._error)
        return self.outputs

    def poll(self) -> bool:
        """Whether it is done. A caller that polls again and again counts as waiting: see `waited`."""
        if not self._done:
            self._polled_at = self._signal.clock.now()
            self._wait_began_at = self._wait_began_at or self._polled_at
        return self._done

    def seconds_waited(self, now: float) -> float:
        """Seconds since somebody first waited for it or polled; 0 if nobody did."""
        return 0.0 if self._wait_began_at is None else now - self._wait_began_at

    def has_waiter(self, now: float) -> bool:
        """Whether a thread is blocked on it now, or polled within the last POLLED_AGAIN seconds."""
        return self._has_blocked_thread or (
            self._polled_at is not None and now - self._polled_at < POLLED_AGAIN
        )

    def complete(self, outputs: tuple[Array, ...] = (), error: Exception | None = None) -> None:
        """Set its outputs or its error. Called by the channel."""
        with self._signal.condition:
            if not self._done:
                self.outputs, self._error, self._done = outputs, error, True
                self._signal.condition.notify_all()


def reraise(error: Exception) -> NoReturn:
    """Raise an error that several callers are told of. For a group's end each gets an error of its own; any other
    keeps the traceback of its origin."""
    if isinstance(error, CollectiveError):
        raise type(error)(error.ranks, error.reason)
    raise error


FUSED_AT_MOST = 1 << 20  # bytes of one operation; copying more of it costs more than a call of its own


@dataclass(frozen=True)
class Task:
    """One operation that is due. own: this rank's; None where it has joined and never asked for it."""

    label: str
    request: Request
    operation: Operation | None


def fuse_tasks(tasks: Sequence[Task], threshold: int) -> Iterator[list[Task]]:
    """Tasks to be carried out together, at most `threshold` bytes of them. The same on every rank."""
    open_batches: dict[object, list[Task]] = {}
    sizes: dict[object, int] = {}
    for task in tasks:
        size, key = nbytes(task.request), _fusion_key(task.request)
        if key is None or size > min(FUSED_AT_MOST, threshold):
            yield [task]
            continue
        if sizes.get(key, 0) + size > threshold:
            yield open_batches.pop(key)
            sizes[key] = 0
        open_batches.setdefault(key, []).append(task)
        sizes[key] = sizes.get(key, 0) + size
    yield from open_batches.values()


def nbytes(request: Request) -> int:
    """Bytes of all arrays of a reduction."""
    return sum(
        _itemsize(name) * math.prod(shape) for name, shape in zip(request.dtypes, request.shapes, strict=True)
    )


def _fusion_key(request: Request) -> object | None:
    if request.kind != ALLREDUCE or request.op == "adasum" or len(set(request.dtypes)) != 1:
        return None
    return request.dtypes[0], request.op, request.scale, request.compression


def validate(own: Operation, size: int) -> None:
    """Check an operation before peers hear of it.

    Raises:
        InvalidInput: its arrays, or what is asked for, make no sense.
    """
    request = own.request
    try:
        for array, name in zip(own.arrays, request.dtypes, strict=True):
            if request.kind in (ALLREDUCE, REDUCESCATTER):
                view = as_array(array, writable=request.kind == ALLREDUCE)
                as_reduction(view, request.op, name, None, request.scale, request.compression)
            if request.kind in (REDUCESCATTER, ALLGATHER, ALLTOALL):
                as_rows(array)
        if request.kind == ALLTOALL:
            validate_splits(len(own.arrays[0]), own.splits, size)
        validate_root(request.root, size)
    except ValueError as error:
        raise InvalidInput(f"{own.label!r}: {error}") from error


def execute(group: Group, batch: Sequence[Task]) -> None:
    """Settles the operations of a batch.

    Raises:
        CollectiveError: the group broke; none of them is settled.
    """
    request = batch[0].request
    if request.kind == ALLREDUCE:
        _execute_allreduces(group, batch)
        return
    own = batch[0].operation
    if request.kind == BARRIER:
        group.barrier()
        outputs: tuple[Array, ...] = ()
    else:
        assert own is not None  # only reductions and barriers can do without
        outputs = _execute_single(group, own)
    if own is not None:
        own.complete(outputs)


def _execute_single(group: Group, own: Operation) -> tuple[Array, ...]:
    request = own.request
    if request.kind == BROADCAST:
        for array in own.arrays:
            group.broadcast(array, request.root)
        return own.arrays
    if request.kind == ALLGATHER:
        return tuple(np.concatenate(group.allgatherv(array)) for array in own.arrays)
    if request.kind == ALLTOALL:
        rows, came = group.alltoall(own.arrays[0], own.splits)
        return rows, np.array(came, np.int64)
    assert request.kind == REDUCESCATTER
    return tuple(
        group.reducescatter(array, request.op, name, None, request.scale, request.compression)
        for array, name in zip(own.arrays, request.dtypes, strict=True)
    )


def _execute_allreduces(group: Group, batch: Sequence[Task]) -> None:
    request = batch[0].request
    arrays: dict[str, list[Array]] = {}
    for task in batch:
        own = make_neutral_arrays(task.request) if task.operation is None else task.operation.arrays
        for name, array in zip(task.request.dtypes, own, strict=True):
            arrays.setdefault(name, []).append(array)
    for name, alike in arrays.items():
        if len(alike) == 1:
            group.allreduce(
                alike[0], request.op, dtype=name, scale=request.scale, compression=request.compression
            )
        else:
            group.grouped_allreduce(alike, request.op, name, None, request.scale, request.compression)
    for task in batch:
        if task.operation is not None:
            task.operation.complete(task.operation.arrays)


def make_neutral_arrays(request: Request) -> tuple[Array, ...]:
    """What a rank that has joined adds to a reduction: nothing that changes its result."""
    return tuple(
        narrow(np.full(shape, _neutral_element_of(request.op, name), _numpy_name(name)), name)
        for name, shape in zip(request.dtypes, request.shapes, strict=True)
    )


def _neutral_element_of(op: str, name: str) -> float:
    if op not in ("min", "max", "product"):
        return 0
    if op == "product":
        return 1
    kind = np.dtype(_numpy_name(name))
    if kind.kind == "f":
        return np.inf if op == "min" else -np.inf
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    if limits is None:  # bool: min is "and", max is "or"
        return op == "min"
    return int(limits.max if op == "min" else limits.min)


def _numpy_name(name: str) -> str:
    """The dtype in which numpy computes it, since numpy has no bfloat16."""
    return "float32" if name in ("bfloat16", "float16") else name


def _itemsize(name: str) -> int:
    return 2 if name == "bfloat16" else np.dtype(name).itemsize
