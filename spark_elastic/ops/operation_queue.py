"""Named operations over one group: ranks tell each other what they have asked for, and carry out what all have.

A round is one small exchange, in which each rank says what is new. A rank with a new request begins a round, and waits
inside it for the ranks without one. If no rank has a request, they still meet now and then. A thread that waits for an
operation drives the rounds; while none waits, the channel's own thread does. Any thread may use `submit`, `join` and
handles. Once the group has broken, so has the channel.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from elastic_collectives import CollectiveError, Group
from elastic_collectives.group import Array
from spark_elastic.config import OperationConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.negotiation import (
    Message,
    Negotiation,
    OperationStallCheck,
    Request,
    Response,
    RoundResult,
)
from spark_elastic.ops.operation import (
    CompletionSignal,
    Operation,
    Task,
    execute,
    fuse_tasks,
    reraise,
    validate,
)
from spark_elastic.ops.timeline import Timeline

HEAD = 512  # bytes of the exchange that each round begins with
_HEADING = struct.Struct("<I?")  # at their beginning: the message's length, and whether the rank is stuck
CYCLE = 0.001  # seconds that the channel's thread waits for further requests before it begins a round
CYCLES = 5  # how many such waits at most, as long as further requests come
IDLE = 0.5  # seconds between rounds while no rank has a request
BACK_OFF = (0.001, 0.05)  # seconds between rounds while every rank has requests and none of them is due
JOIN = Request("join")


class OperationQueue:
    """The named operations of one group, from the first one on."""

    def __init__(
        self,
        group: Group,
        desk: CompletionSignal,
        limits: OperationConfig,
        name: str = "",
        timeline: Timeline | None = None,
    ) -> None:
        """name: of the process set, for messages; "" for the whole world."""
        self.group = group
        self.timeline = timeline
        self._signal = desk
        self._clock = desk.clock
        self._limits = limits
        self._wait_at_most = group.timeout if limits.wait_at_most is None else limits.wait_at_most
        self._stall_check = OperationStallCheck(name, limits.warn_after, group.members)
        self._negotiation = Negotiation(group.rank, group.size)
        self._condition = desk.condition  # its lock guards everything below
        self._new: list[Operation] = []
        self._announcing: list[Operation] = []  # what this rank announces in the round under way
        self._announced: dict[str, Operation] = {}  # announced and not due yet, by label
        self._by_name: dict[str, Operation] = {}  # those in `_live` and `_new` that have a name, by name
        self._join: Operation | None = None
        self._steps_before_join = 0  # that this rank took before it joined
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._wake_thread = threading.Event()  # there is work for the channel's thread
        self._waiting_threads = 0  # threads that wait for an operation, and drive the rounds meanwhile
        self._idle = False  # this rank has no request in the round under way, or in the next one
        self._in_round = False  # a thread is in a round; only that thread changes what follows
        self._last_round_at = desk.clock.now()
        self._quiet_since = desk.clock.now()
        self._back_off = BACK_OFF[0]

    def submit(
        self,
        request: Request,
        arrays: Sequence[Array] = (),
        splits: list[int] | None = None,
        awaited: bool = False,
    ) -> Operation:
        """Ask for an operation; its arrays belong to the channel until the handle is done.

        awaited: the caller waits for it at once, and nobody else needs to see to it.

        Raises:
            InvalidInput: it makes no sense, or one of that name is under way. CollectiveError: the group broke. Any
                other: this rank could not carry out what was asked for.
        """
        operation = Operation(request, arrays, self._signal, self._progress, splits)
        validate(operation, self.group.size)
        with self._condition:
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
        """Take part in reductions with nothing to add, until all ranks do; outputs: the rank that was last to join.

        steps: that this rank has taken in this world together with the others, by other means than operations.
        """
        operation = Operation(JOIN, (), self._signal, self._progress)
        with self._condition:
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
        """End the thread and the group; what is under way fails."""
        self.group.close()
        self._break(self._error or CollectiveError((), "the channel is closed"))
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
            self._thread = threading.Thread(target=self._run, name="spark-elastic-operations", daemon=True)
            self._thread.start()
        if not awaited:
            self._wake_thread.set()

    def _set_idle(self, *, idle: bool) -> None:
        """An idle round has no deadline, since nobody waits for it: a rank that cannot come to it, because a long call
        holds the interpreter's lock, breaks nothing. The group's timeout counts again from the first request on."""
        if idle is not self._idle:
            self._idle = idle
            self.group.limit(None if idle else self.group.timeout)

    # ---- whoever drives

    def _run(self) -> None:
        """The channel's thread."""
        while self._error is None:
            asked = self._wake_thread.wait(IDLE)
            self._wake_thread.clear()
            self._collect_more_requests()
            self._run_round_unless(partial(self._can_skip_round, asked))
            if self._has_work() and not self._waiting_threads:
                self._wake_thread.set()

    def _can_skip_round(self, asked: bool) -> bool:
        """Whether the channel's thread leaves out its round. Threads that wait drive rounds themselves: turns with
        them would cost more than a round."""
        due = self._has_work() if asked else self._clock.now() - self._last_round_at > IDLE / 2
        return self._waiting_threads > 0 or not due

    def _collect_more_requests(self) -> None:
        for _ in range(CYCLES):
            before = len(self._new)
            if not before:
                return
            self._clock.sleep(CYCLE)
            if len(self._new) <= before:
                return

    def _progress(self, operation: Operation) -> None:
        """Drive rounds until the operation is done. Called by a thread that waits for it."""
        with self._condition:
            self._waiting_threads += 1
        try:
            while not operation.done:
                self._run_round_unless(lambda: operation.done)
        finally:
            with self._condition:
                self._waiting_threads -= 1
            if self._has_work():  # what is left is the thread's
                self._wake_thread.set()

    def _has_work(self) -> bool:
        return bool(self._new or self._announced or self._join or self._error)

    def _run_round_unless(self, over: Callable[[], bool]) -> None:
        """Take one round as soon as no other thread is in one; none if `over()` by then."""
        with self._condition:
            self._condition.wait_for(lambda: over() or not self._in_round)
            if over():
                return
            self._in_round = True
        try:
            self._run_round_or_break()
        finally:
            with self._condition:
                self._in_round = False
                self._condition.notify_all()

    def _run_round_or_break(self) -> None:
        """One round, unless the channel is broken."""
        if self._error is not None:
            return
        try:
            self._run_round(self._collect_messages())
        except CollectiveError as error:
            self._break(error.among(self.group.members))
        except BaseException as error:  # peers must not wait for this rank until their timeout
            reason = f"rank {self.group.rank} cannot go on: {type(error).__name__}: {error}"
            self.group.abort(reason)
            if isinstance(error, Exception):
                self._break(error)  # as itself: it is no loss that another world could mend
            else:
                self._break(CollectiveError((self.group.rank,), reason).among(self.group.members))
                raise  # Ctrl-C in a thread that waits

    def _break(self, error: Exception) -> None:
        with self._condition:
            self._error = error
            open_ones = [*self._new, *self._announcing, *self._announced.values()]
        for operation in [*open_ones, self._join] if self._join else open_ones:
            operation.complete(error=error)

    def _collect_messages(self) -> list[Message]:
        """Wait until a round is worthwhile. Returns what this rank says in it."""
        with self._condition:
            if (self._announced or self._join) and self._negotiation.all_ranks_wait:
                self._condition.wait_for(lambda: self._new or self._error, self._back_off)
            new, self._new = self._new, []
            self._set_idle(idle=not (new or self._announced or self._join))
        if new:
            self._quiet_since = self._clock.now()
        words = [
            Message(None if o.request is JOIN else o.request, joined=self._steps_before_join) for o in new
        ]
        now = self._clock.now()
        words += [
            Message(expired=label)
            for label, operation in self._announced.items()
            if operation.seconds_waited(now) > self._wait_at_most
        ]
        self._announcing = [operation for operation in new if operation.request is not JOIN]
        return words

    def _run_round(self, words: list[Message]) -> None:
        begin = self._clock.now()
        said, stuck = self._exchange(self._negotiation.encode(words))
        self._last_round_at = self._clock.now()
        came = self._negotiation.process(said, stuck)
        for label, operation in zip(came.announced, self._announcing, strict=True):
            operation.label, operation.announced_at = label, begin
            self._announced[label] = operation
        self._announcing = []
        if came.responses or came.last_joined is not None:
            self._quiet_since, self._back_off = self._clock.now(), BACK_OFF[0]
        elif self._negotiation.all_ranks_wait:
            self._back_off = min(2 * self._back_off, BACK_OFF[1])
        if self.timeline is not None:
            self.timeline.cycle(begin)
        self._execute_responses(came)
        if self.group.rank == 0:
            self._stall_check.check(self._negotiation.pending, self._clock.now())

    def _exchange(self, message: bytes) -> tuple[list[bytes], bool]:
        """What all ranks say, and whether all of them have been waiting for long."""
        first = message[: HEAD - _HEADING.size]
        head = _HEADING.pack(len(message), self._seems_deadlocked()) + first
        heads = self.group.allgather(np.frombuffer(head.ljust(HEAD, b"\0"), np.uint8)).tobytes()
        headings = [_HEADING.unpack_from(heads, at) for at in range(0, len(heads), HEAD)]
        stuck = all(waits for _, waits in headings)
        if max(length for length, _ in headings) > HEAD - _HEADING.size:
            return self.group.allgather_bytes(message), stuck
        begins = range(_HEADING.size, len(heads), HEAD)
        return [heads[at : at + length] for at, (length, _) in zip(begins, headings, strict=True)], stuck

    def _seems_deadlocked(self) -> bool:
        now = self._clock.now()
        waits = self._join is not None or any(
            operation.has_waiter(now) for operation in self._announced.values()
        )
        return waits and not self._new and now - self._quiet_since > self._limits.stuck_after

    def _execute_responses(self, came: RoundResult) -> None:
        with self._condition:
            for one in came.responses:
                self._by_name.pop(one.label, None)
        due = [
            Task(one.label, one.request, self._announced.get(one.label))
            for one in came.responses
            if not one.error
        ]
        for one in came.responses:
            if one.error is not None:
                self._fail_operation(one)
        for batch in fuse_tasks(due, self._limits.fusion_threshold):
            begin = self._clock.now()
            execute(self.group, batch)
            for task in batch:
                self._announced.pop(task.label, None)
                if self.timeline is not None and task.operation is not None:
                    self.timeline.operation(task.operation, begin, self._clock.now())
        if came.last_joined is not None and self._join is not None:
            joined, self._join = self._join, None
            joined.complete((np.array([came.last_joined], np.int64),))

    def _fail_operation(self, due: Response) -> None:
        own = self._announced.pop(due.label, None)
        if own is not None:
            own.complete(error=due.error and due.error.among(self.group.members))
