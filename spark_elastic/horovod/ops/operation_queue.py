"""Named operations over one group: ranks request them in any order, and carry them out in one order.

In each round the ranks exchange a small message: what each of them newly requests. A rank with a request starts a
round, and waits inside it for the ranks that have none; without requests the ranks still meet every IDLE seconds. A
thread that waits for an operation runs the rounds itself, otherwise the thread of the queue does. Any thread may call
`submit` and `join`, and use handles. After the group has broken, every call raises.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from elastic_collectives import CollectiveError, Group
from spark_elastic.clock import Clock
from spark_elastic.config import OperationConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.horovod.ops.negotiation import Message, Negotiation, OperationRequest, RoundResult
from spark_elastic.horovod.ops.operation import (
    Arrays,
    Operation,
    Task,
    execute,
    fuse_tasks,
    reraise,
    validate,
)

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
