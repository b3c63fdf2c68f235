"""One negotiated operation: its handle, and its execution on a group in the order that all ranks agreed on.

Small allreduces of one kind that are ready together are fused: every rank fuses the same ones, since the same
operations are ready everywhere. The thread that runs the queue's round executes operations; any thread may wait for
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np

from elastic_collectives import CollectiveError, Group, operands
from elastic_collectives.operands import Array, as_array, as_rows, narrow
from spark_elastic.errors import InvalidInput
from spark_elastic.horovod.ops.negotiation import OperationRequest

if TYPE_CHECKING:
    from spark_elastic.horovod.ops.operation_queue import OperationQueue

Arrays: TypeAlias = Sequence[Array]

POLLED_AGAIN = 0.5  # seconds: a caller that polls more rarely than this does other things meanwhile


class Operation:
    """The handle of an operation. `outputs` once it is done: for allreduce and broadcast the arrays themselves, changed
    in place; for allgather and reducescatter a new array for each; for alltoall the rows received, and how many came
    from each rank."""

    def __init__(
        self,
        request: OperationRequest,
        arrays: Arrays,
        queue: OperationQueue,
        splits: list[int] | None = None,
    ) -> None:
        """splits: of an alltoall: rows for each rank."""
        self.request = request
        self.arrays = tuple(arrays)
        self.splits = splits
        self.label = request.name or f"unnamed {request.kind}"  # the negotiation gives unnamed ones another
        self.requested_at = queue.clock.now()
        self.announced_at = self.requested_at  # when the round began in which the other ranks learned of it
        self.outputs: tuple[Array, ...] = ()
        self.done = False  # `wait` returns or raises at once
        self._queue = queue
        self._wait_began_at: float | None = None  # the first call of `wait` or `poll`
        self._polled_at: float | None = None  # the last call of `poll`
        self._has_blocked_thread = False
        self._error: Exception | None = None

    def wait(self) -> tuple[Array, ...]:
        """Run rounds until the operation is done, as long as the queue's deadlines let it. Raises CollectiveError if
        it failed, or the group broke, and any Exception for which this rank itself could not carry it out."""
        if not self.done:
            self._has_blocked_thread = True
            self._wait_began_at = self._wait_began_at or self._queue.clock.now()
            with self._queue.record_wait():
                self._queue.run_until_done(self)
        if self._error is not None:
            reraise(self._error)
        return self.outputs

    def poll(self) -> bool:
        """Whether it is done. A caller that polls repeatedly counts as waiting: see `count_seconds_waited`."""
        if not self.done:
            self._polled_at = self._queue.clock.now()
            self._wait_began_at = self._wait_began_at or self._polled_at
        return self.done

    def count_seconds_waited(self, now: float) -> float:
        return 0.0 if self._wait_began_at is None else now - self._wait_began_at

    def has_waiter(self, now: float) -> bool:
        """Whether a thread is blocked on it, or has polled it within the last POLLED_AGAIN seconds."""
        polls = self._polled_at is not None and now - self._polled_at < POLLED_AGAIN
        return self._has_blocked_thread or polls

    def complete(self, outputs: tuple[Array, ...] = (), error: Exception | None = None) -> None:
        """Set the outputs or the error, unless it is done already."""
        with self._queue.condition:
            if not self.done:
                self.outputs, self._error, self.done = outputs, error, True
                self._queue.condition.notify_all()


def reraise(error: Exception) -> NoReturn:
    """Each of several callers gets a CollectiveError of its own; any other error keeps the traceback of its origin."""
    if isinstance(error, CollectiveError):
        raise type(error)(error.ranks, error.reason)
    raise error


FUSED_AT_MOST = 1 << 20  # bytes of an operation: to copy a larger one costs more than a collective of its own


@dataclass(frozen=True)
class Task:
    label: str  # as in its `Response`
    request: OperationRequest  # as in its `Response`
    operation: Operation | None  # None: this rank has joined and has not requested it


def fuse_tasks(tasks: Sequence[Task], threshold: int) -> Iterator[list[Task]]:
    """Yield batches of tasks to carry out as one, of at most `threshold` bytes; every rank yields the same."""
    open_batches: dict[object, list[Task]] = {}
    sizes: dict[object, int] = {}
    for task in tasks:
        size, key = _count_bytes(task.request), _fusion_key(task.request)
        if key is None or size > min(FUSED_AT_MOST, threshold):
            yield [task]
            continue
        if sizes.get(key, 0) + size > threshold:
            yield open_batches.pop(key)
            sizes[key] = 0
        open_batches.setdefault(key, []).append(task)
        sizes[key] = sizes.get(key, 0) + size
    yield from open_batches.values()


def _count_bytes(request: OperationRequest) -> int:
    kinds = zip(request.dtypes, request.shapes, strict=True)
    return sum(
        (2 if name == "bfloat16" else np.dtype(name).itemsize) * math.prod(shape) for name, shape in kinds
    )


def _fusion_key(request: OperationRequest) -> object | None:
    if request.kind != "allreduce" or request.op == "adasum" or len(set(request.dtypes)) != 1:
        return None
    return request.dtypes[0], request.op, request.scale, request.compression


def validate(operation: Operation, size: int) -> None:
    """Raise InvalidInput if arrays or arguments are invalid, before this rank announces the operation."""
    request = operation.request
    try:
        for array, name in zip(operation.arrays, request.dtypes, strict=True):
            if request.kind in ("allreduce", "reducescatter"):
                view = as_array(array, writable=request.kind == "allreduce")
                operands.as_reduction(view, request.op, name, None, request.scale, request.compression)
            if request.kind in ("reducescatter", "allgather", "alltoall"):
                as_rows(array)
        if request.kind == "alltoall":
            operands.validate_splits(len(operation.arrays[0]), operation.splits, size)
        operands.validate_root(request.root, size)
    except ValueError as error:
        raise InvalidInput(f"{operation.label!r}: {error}") from error


def execute(group: Group, batch: Sequence[Task]) -> None:
    """Carry out a batch and complete its operations; none of them if the group breaks."""
    request = batch[0].request
    if request.kind == "allreduce":
        _execute_allreduces(group, batch)
        return
    operation = batch[0].operation
    if request.kind == "barrier":
        group.barrier()
        outputs: tuple[Array, ...] = ()
    else:
        assert operation is not None  # a rank that has joined takes part in allreduces and barriers only
        outputs = _execute_single(group, operation)
    if operation is not None:
        operation.complete(outputs)


def _execute_single(group: Group, operation: Operation) -> tuple[Array, ...]:
    request = operation.request
    if request.kind == "broadcast":
        for array in operation.arrays:
            group.broadcast(array, request.root)
        return operation.arrays
    if request.kind == "allgather":
        return tuple(np.concatenate(group.allgatherv(array)) for array in operation.arrays)
    if request.kind == "alltoall":
        rows, counts = group.alltoall(operation.arrays[0], operation.splits)
        return rows, np.array(counts, np.int64)
    assert request.kind == "reducescatter"
    return tuple(
        group.reducescatter(array, request.op, name, None, request.scale, request.compression)
        for array, name in zip(operation.arrays, request.dtypes, strict=True)
    )


def _execute_allreduces(group: Group, batch: Sequence[Task]) -> None:
    request = batch[0].request
    arrays: dict[str, list[Array]] = {}
    for task in batch:
        mine = make_neutral_arrays(task.request) if task.operation is None else task.operation.arrays
        for name, array in zip(task.request.dtypes, mine, strict=True):
            arrays.setdefault(name, []).append(array)
    for name, alike in arrays.items():
        group.grouped_allreduce(alike, request.op, name, None, request.scale, request.compression)
    for task in batch:
        if task.operation is not None:
            task.operation.complete(task.operation.arrays)


def make_neutral_arrays(request: OperationRequest) -> tuple[Array, ...]:
    """What a rank that has joined contributes: arrays that do not change the result of the reduction."""
    op, factor = request.op, request.scale[0]
    return tuple(
        narrow(np.full(shape, _find_neutral_element(op, name, factor), _numpy_name(name)), name)
        for name, shape in zip(request.dtypes, request.shapes, strict=True)
    )


def _find_neutral_element(op: str, name: str, factor: float) -> float:
    """factor: by which every contribution is multiplied before the reduction."""
    if op not in ("min", "max", "product") or factor == 0:  # 0: all others contribute zeros, too
        return 0
    kind = np.dtype(_numpy_name(name))
    if op == "product":
        return 1 / factor if kind.kind == "f" else 1
    largest = (op == "min") == (factor > 0)
    if kind.kind == "f":
        return np.inf if largest else -np.inf
    if kind.kind not in "iu":  # bool: min is "and", max is "or"
        return largest
    limits = np.iinfo(kind)
    return int(limits.max if largest else limits.min)


def _numpy_name(name: str) -> str:
    """The dtype in which numpy computes `name`: it has no bfloat16."""
    return "float32" if name in ("bfloat16", "float16") else name
