"""Named operations over one group: ranks request them in any order, and carry them out in one order.

In each round the ranks exchange a small message: what each of them newly requests. A rank with a request starts a
round, and waits inside it for the ranks that have none; without requests the ranks still meet every IDLE seconds. A
thread that waits for an operation runs the rounds itself, otherwise the thread of the queue does. Any thread may call
`submit` and `join`, and use handles. After the group has broken, every call raises.

Small allreduces of one kind that are ready together are fused: every rank fuses the same ones, since the same
operations are ready everywhere.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeAlias

import numpy as np

from elastic_collectives import CollectiveError, Group, operands
from elastic_collectives.operands import Array, as_array, as_rows, narrow
from spark_elastic.clock import Clock
from spark_elastic.config import OperationConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.horovod.ops.negotiation import Message, Negotiation, OperationRequest, RoundResult

Arrays: TypeAlias = Sequence[Array]

HEAD = 1024  # bytes of the exchange that each round begins with; longer messages take a second exchange
_HEADING = struct.Struct("<I?")  # they begin with: the message's length, whether the rank seems deadlocked
# Seconds that the thread of the queue waits for further requests before it starts a round.
COLLECT_WAIT = 0.001
COLLECT_WAITS = 5  # how many such waits at most, as long as further requests come
# Ranks without a request meet as well, so that the log can say which rank lacks what.
IDLE = 0.5  # seconds between rounds while no rank has a request
BACK_OFF = (0.001, 0.05)  # seconds between rounds while every rank has requests and none of them is ready
JOIN = OperationRequest("join")

log = logging.getLogger(__name__)


class OperationQueue:
    def __init__(
        self,
        group: Group,
        clock: Clock,
        limits: OperationConfig,
        name: str = "",
        record_wait: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """name: of the process set, for messages; "" for the whole world. record_wait: entered around waits."""
        self.group = group
        self.clock = clock
        self.record_wait = record_wait
        self.timeline: Timeline | None = None  # where to write what this rank carries out
        self.condition = threading.Condition()  # notified whenever an operation completes or a round ends
        self._limits = limits
        self._wait_at_most = group.timeout if limits.wait_at_most is None else limits.wait_at_most
        self._stall_check = OperationStallCheck(name, limits.warn_after, group.members)
        self._negotiation = Negotiation(group.rank, group.size)
        self._thread: threading.Thread | None = None
        self._wake_thread = threading.Event()  # there is work for the thread of the queue
        # The lock of `condition` guards the following.
        self._new: list[Operation] = []  # requested, and not announced yet
        self._announcing: list[Operation] = []  # announced in the present round
        self._announced: dict[str, Operation] = {}  # announced and not ready yet, by label
        self._by_name: dict[str, Operation] = {}  # the named ones of `_new`, `_announcing` and `_announced`
        self._join: Operation | None = None  # this rank has joined
        self._steps_before_join = 0
        self._error: Exception | None = None  # what broke the queue
        self._waiting_threads = 0  # threads that wait for an operation, and run rounds meanwhile
        self._idle = False  # this rank has no request in the present round, or in the next one
        # A thread is in a round. Only that thread changes the following.
        self._in_round = False
        self._last_round_at = clock.now()
        self._progress_at = clock.now()  # when this rank last had a new request or a decision
        self._back_off = BACK_OFF[0]

    def submit(
        self,
        request: OperationRequest,
        arrays: Arrays = (),
        splits: list[int] | None = None,
        awaited: bool = False,
    ) -> Operation:
        """Request an operation. Its arrays belong to the queue until the handle is done. awaited: the caller waits for
        it at once, so that the thread of the queue need not wake up.

        Raises:
            InvalidInput: the arguments are invalid, or an operation of that name is in progress.
            Exception: what broke the queue on this rank, such as a CollectiveError.
        """
        operation = Operation(request, arrays, self, splits)
        validate(operation, self.group.size)
        with self.condition:
            self._check_usable()
            former = self._by_name.get(request.name or "")
            if former is not None and not former.done:
                raise InvalidInput(
                    f"an operation {request.name!r} is under way: wait for it, or give this one another name."
                )
            if self.group.size == 1:
                execute(self.group, [Task(operation.label, request, operation)])
                return operation
            if request.name is not None:
                self._by_name[request.name] = operation
            self._add(operation, awaited)
        return operation

    def join(self, steps: int = 0) -> Operation:
        """Take part in allreduces and barriers without contributing, until all ranks have joined. The handle's output
        is the rank that joined last. steps: of the optimizer in this world, by which ranks tell who was last."""
        operation = Operation(JOIN, (), self)
        with self.condition:
            self._check_usable()
            if self._join is not None:
                raise InvalidInput("this rank has joined: wait for that handle.")
            if self.group.size == 1:
                operation.complete((np.zeros(1, np.int64),))
                return operation
            self._join, self._steps_before_join = operation, steps
            self._add(operation, awaited=False)
        return operation

    def close(self) -> None:
        """End the thread and the group. Operations in progress fail."""
        self.group.close()
        self._break(self._error or CollectiveError((), "the operation queue is closed"))
        self._wake_thread.set()
        if self._thread is not None:
            self._thread.join()

    def _check_usable(self) -> None:
        if self._error is not None:
            reraise(self._error)

    def _add(self, operation: Operation, awaited: bool) -> None:
        self._new.append(operation)
        self._set_idle(idle=False)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="spark-elastic-operations", daemon=True)
            thread.start()  # may fail; then the next request tries again
            self._thread = thread
        if not awaited:
            self._wake_thread.set()

    def _set_idle(self, *, idle: bool) -> None:
        """An idle round has no timeout, since no thread waits for it: a rank that is late, because a long call holds
        the interpreter lock, breaks nothing. The timeout counts from the first request on."""
        if idle is not self._idle:
            self._idle = idle
            self.group.set_timeout(None if idle else self.group.timeout)

    # ---- which thread runs a round

    def _run(self) -> None:
        while self._error is None:
            woken = self._wake_thread.wait(IDLE)
            self._wake_thread.clear()
            self._collect_more_requests()
            self._run_round_unless(partial(self._can_skip_round, woken))
            if self._has_work() and not self._waiting_threads:
                self._wake_thread.set()

    def _can_skip_round(self, woken: bool) -> bool:
        """Whether to leave a round to the threads that wait for operations: taking turns would cost more than it."""
        needed = self._has_work() if woken else self.clock.now() - self._last_round_at > IDLE / 2
        return self._waiting_threads > 0 or not needed

    def _collect_more_requests(self) -> None:
        for _ in range(COLLECT_WAITS):
            before = len(self._new)
            if not before:
                return
            self.clock.sleep(COLLECT_WAIT)
            if len(self._new) <= before:
                return

    def run_until_done(self, operation: Operation) -> None:
        with self.condition:
            self._waiting_threads += 1
        try:
            while not operation.done:
                self._run_round_unless(lambda: operation.done)
        finally:
            with self.condition:
                self._waiting_threads -= 1
            if self._has_work():  # the thread of the queue does the rest
                self._wake_thread.set()

    def _has_work(self) -> bool:
        return bool(self._new or self._announced or self._join or self._error)

    def _run_round_unless(self, is_over: Callable[[], bool]) -> None:
        """Run one round as soon as no other thread is in one, unless `is_over()` holds by then."""
        with self.condition:
            self.condition.wait_for(lambda: is_over() or not self._in_round)
            if is_over():
                return
            self._in_round = True
        try:
            self._run_round_or_break()
        finally:
            with self.condition:
                self._in_round = False
                self.condition.notify_all()

    # ---- one round

    def _run_round_or_break(self) -> None:
        if self._error is not None:
            return
        try:
            self._run_round(self._collect_messages())
        except CollectiveError as error:
            self._break(error.to_world_ranks(self.group.members))
        except BaseException as error:  # peers must not wait for this rank until their timeout
            reason = f"rank {self.group.rank} cannot continue: {type(error).__name__}: {error}"
            self.group.abort(reason)
            if isinstance(error, Exception):
                self._break(error)  # as itself: another world would not mend it
            else:
                self._break(CollectiveError((self.group.rank,), reason).to_world_ranks(self.group.members))
                raise  # Ctrl-C in a thread that waits

    def _break(self, error: Exception) -> None:
        with self.condition:
            self._error = error
            operations = [*self._new, *self._announcing, *self._announced.values()]
            if self._join is not None:
                operations.append(self._join)
        for operation in operations:
            operation.complete(error=error)

    def _collect_messages(self) -> list[Message]:
        """Wait until a round is worthwhile. Returns what this rank sends in it."""
        with self.condition:
            if (self._announced or self._join) and self._negotiation.all_ranks_wait:
                self.condition.wait_for(lambda: self._new or self._error, self._back_off)
            new, self._new = self._new, []
            self._set_idle(idle=not (new or self._announced or self._join))
        now = self.clock.now()
        if new:
            self._progress_at = now
        messages = [
            Message(None if operation.request is JOIN else operation.request, joined=self._steps_before_join)
            for operation in new
        ]
        messages += [
            Message(expired=label)
            for label, operation in self._announced.items()
            if operation.count_seconds_waited(now) > self._wait_at_most
        ]
        self._announcing = [operation for operation in new if operation.request is not JOIN]
        return messages

    def _run_round(self, messages: list[Message]) -> None:
        begin = self.clock.now()
        texts, deadlocked = self._exchange(self._negotiation.encode(messages))
        self._last_round_at = self.clock.now()
        result = self._negotiation.process(texts, deadlocked)
        for label, operation in zip(result.announced, self._announcing, strict=True):
            operation.label, operation.announced_at = label, begin
            self._announced[label] = operation
        self._announcing = []
        if result.responses or result.last_joined is not None:
            self._progress_at, self._back_off = self.clock.now(), BACK_OFF[0]
        elif self._negotiation.all_ranks_wait:
            self._back_off = min(2 * self._back_off, BACK_OFF[1])
        if self.timeline is not None:
            self.timeline.mark_round(begin)
        self._execute_responses(result)
        if self.group.rank == 0:
            self._stall_check.check(self._negotiation.pending, self.clock.now())

    def _exchange(self, message: bytes) -> tuple[list[bytes], bool]:
        """Returns the messages of all ranks, and whether all ranks seem deadlocked."""
        first = message[: HEAD - _HEADING.size]
        head = _HEADING.pack(len(message), self._seems_deadlocked()) + first
        heads = self.group.allgather(np.frombuffer(head.ljust(HEAD, b"\0"), np.uint8)).tobytes()
        headings = [_HEADING.unpack_from(heads, at) for at in range(0, len(heads), HEAD)]
        deadlocked = all(seems for _, seems in headings)
        if max(length for length, _ in headings) > HEAD - _HEADING.size:
            return self.group.allgather_bytes(message), deadlocked
        begins = range(_HEADING.size, len(heads), HEAD)
        texts = [heads[at : at + length] for at, (length, _) in zip(begins, headings, strict=True)]
        return texts, deadlocked

    def _seems_deadlocked(self) -> bool:
        """Whether this rank waits, without progress for `stuck_after` seconds."""
        now = self.clock.now()
        waits = self._join is not None or any(o.has_waiter(now) for o in self._announced.values())
        return waits and not self._new and now - self._progress_at > self._limits.stuck_after

    def _execute_responses(self, result: RoundResult) -> None:
        with self.condition:
            for response in result.responses:
                self._by_name.pop(response.label, None)
        tasks = []
        for response in result.responses:
            if response.error is None:
                tasks.append(Task(response.label, response.request, self._announced.get(response.label)))
            elif (operation := self._announced.pop(response.label, None)) is not None:
                operation.complete(error=response.error.to_world_ranks(self.group.members))
        for batch in fuse_tasks(tasks, self._limits.fusion_threshold):
            begin = self.clock.now()
            execute(self.group, batch)
            for task in batch:
                self._announced.pop(task.label, None)
                if self.timeline is not None and task.operation is not None:
                    ours = task.operation
                    times = (ours.requested_at, ours.announced_at, begin, self.clock.now())
                    self.timeline.write_operation(ours.label, ours.request.kind, times)
        if result.last_joined is not None and self._join is not None:
            joined, self._join = self._join, None
            joined.complete((np.array([result.last_joined], np.int64),))


class OperationStallCheck:
    """Horovod's stall check of operations that some ranks have requested and others have not."""

    def __init__(self, process_set: str, warn_after: float, members: Sequence[int]) -> None:
        """members: rank in the world of each rank of the process set, whose name is "" for the whole world."""
        self._where = f" of {process_set}" if process_set else ""
        self._warn_after = warn_after
        self._members = members
        self._pending_since: dict[str, float] = {}  # by label
        self._warned_at: dict[str, float] = {}  # by label

    def check(self, pending: Mapping[str, tuple[int, ...]], now: float) -> None:
        for label in self._pending_since.keys() - pending.keys():
            del self._pending_since[label]
            self._warned_at.pop(label, None)
        for label, missing in pending.items():
            since = self._pending_since.setdefault(label, now)
            if now - self._warned_at.get(label, since) >= self._warn_after:
                self._warned_at[label] = now
                ranks = ", ".join(str(self._members[rank]) for rank in missing)
                log.warning(
                    "operation %r%s has been waiting for %.0f s for rank(s) %s, which did not request it.",
                    *(label, self._where, now - since, ranks),
                )


# ---- one operation

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
