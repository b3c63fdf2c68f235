"""The agent of a slot: registers the slot, keeps one worker and one warm spare alive, sends heartbeats and log lines.

Runs in the main thread of the slot's task; knows no Spark. Helper threads poll for commands, send heartbeats and lines.
A worker's failure is reported, never raised, and a lack of descriptors or memory ends no thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from spark_elastic.clock import Clock
from spark_elastic.config import find_interface_address
from spark_elastic.errors import DriverUnreachable, ElasticError
from spark_elastic.protocol import messages
from spark_elastic.protocol.types import (
    MAX_HEARTBEAT_INTERVAL,
    NOT_RUNNING,
    SLOT_LINE_PREFIX,
    STOPPED,
    Checkpoint,
    SlotIdentity,
    SlotSpec,
    WorkerId,
)
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, LogLines, SlotCommands, WatchSlot
from spark_elastic.worker.child import LINE_AT_MOST, Child, OomKillCounter
from spark_elastic.worker.devices import GpuClaims
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.handover import Activation, describe_exit

if TYPE_CHECKING:
    from spark_elastic.runs.kept_commits import KeptCommits

MEMORY_CHECK_EVERY = 30.0  # seconds between two checks of the memory of the slot's processes
SPARE_RETRY = 10.0  # seconds until a spare that could not be started is tried again
STACK_AFTER = 1.0  # seconds of work without waiting for others, after which heartbeats carry the stack
SEND_LINES_EVERY = 0.2  # seconds between two messages of log lines
LINES_AT_ONCE = 500  # in one message
CHARACTERS_AT_ONCE = LINE_AT_MOST  # a message can hold twice as many, whatever their encoding
# In a job whose slots send heartbeats as often as any: what others wait for is told at each look, R24 (suspicion); in
# bitwise mode also that they wait.
CHECK_EVERY = 0.1  # seconds between two looks at the worker
REPORT_WAITS = 0.05, 2.0  # seconds for which the worker has waited for others, from which on and until when
STOP_GRACE = 3.0  # seconds that a worker told to stop gets before its slot kills it
# Seconds for a former spare to join before the next spare is started; one that is forked costs it little.
JOIN_GRACE, FORK_GRACE = 1.0, 0.25
LAST_LINES_WAIT = 2.0  # seconds for sending the last log lines to the driver
THREAD_END_WAIT = 5.0  # seconds for threads whose requests were cancelled
HEARTBEAT_PATIENCE = 1.0  # intervals for which a heartbeat's answer is awaited; more is a lease

R = TypeVar("R")


@dataclass(eq=False, repr=False)
class SlotAgent:
    """One slot, from registration to release."""

    spec: SlotSpec
    identity: SlotIdentity
    payload: bytes  # the pickled program
    client: RendezvousClient
    clock: Clock
    facts: dict[str, Any] = field(default_factory=dict)  # by which the driver decides about admission
    # Given the process ids of worker, spare and fork server: what they show of a shortage of memory, or None.
    find_shortage: Callable[[int, int | None, int | None], str | None] = lambda *pids: None

    def __post_init__(self) -> None:
        self._gpu_claims = GpuClaims()
        # What this host keeps of the run; None: the job has no run, or keeps nothing.
        self._kept: KeptCommits | None = None
        if self.spec.commit_key is not None:
            from spark_elastic.runs.kept_commits import KeptCommits  # it imports numpy, which takes long

            self._kept = KeptCommits(self.spec.commit_key)
        self._reason: str | None = None  # why the slot ends; None: it does not
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._later: list[tuple[float, Callable[[], object]]] = []  # when, and what; main thread only
        self._lines: queue.SimpleQueue[tuple[WorkerId | None, str]] = queue.SimpleQueue()
        self._active: Child | None = None
        self._spare: Child | None = None
        self._stopping: Child | None = None  # the worker that was told to end
        self._started = 0
        self._oom_kills = OomKillCounter()
        self._heartbeat_every = 1.0
        self._registered_at = self.clock.now()
        self._closing = threading.Event()
        self._lines_complete = threading.Event()
        calls = {"logs": self._send_lines, "watch": self._watch, "heartbeat": self._send_heartbeats}
        named = [(name, f"spark-elastic-{name}", call) for name, call in calls.items()]
        self._threads = {key: Thread(target=call, name=name, daemon=True) for key, name, call in named}

    def run(self) -> str:
        """Serve until released; returns why the slot ended.

        Raises:
            DriverUnreachable: the driver did not answer the registration.
            InvalidInput: this host lacks the job's network interface.
        """
        if self.spec.network_interface:
            address = find_interface_address(self.spec.network_interface)
            self.identity = replace(self.identity, address=address)
        me = self.identity = self._gpu_claims.assign(self.spec, self.identity, os.environ)
        found = str(self.facts.get("host", "")), me.device_problem, self.facts, self._find_kept()
        try:
            answer = self.client.ask(messages.RegisterSlot(me.slot, me.host, me.slot.launch, *found))
        except BaseException:
            self._gpu_claims.close()  # Spark uses this process again, for another slot
            raise
        self._heartbeat_every = answer.heartbeat_interval
        self._registered_at = self.clock.now()
        for thread in self._threads.values():
            thread.start()
        try:
            if me.device_problem:
                self._lines.put((None, f"{SLOT_LINE_PREFIX}{me.device_problem}"))
            if answer.accepted:
                self._promote()
            # A refused slot waits as well: a return would end the task's other attempts: R14 (duplicates).
            while self._reason is None:
                self._next_event()()
            return self._reason
        finally:
            self._close()

    def _find_kept(self) -> Checkpoint | None:
        return None if self._kept is None else self._kept.find_newest()

    # ---- main thread

    def _start_child(self) -> Child:
        return Child.start(
            self.spec,
            self.identity,
            self.payload,
            self._on_line,
            lambda child: self._events.put(lambda: self._handle_warm(child)),
            lambda child, code: self._events.put(lambda: self._handle_exit(child, code)),
        )

    def _promote(self, activation: Activation | None = None) -> None:
        """Make the spare the slot's worker, or start a worker if there is no spare. None: a worker of a new name."""
        self._started += 1
        activation = activation or Activation(WorkerId.build(self.identity.slot, self._started))
        child = self._spare if self._spare is not None else self._start_child()
        self._active, self._spare = child, None
        child.worker = activation.worker  # from here on its lines are the worker's
        self._ask(messages.WorkerStarted(self.identity.slot, child.worker, self._find_kept()))
        child.activate(activation)
        if child.warm:
            grace = JOIN_GRACE if fork_server_cache.pid is None else FORK_GRACE
            self._call_later(grace, lambda: self._handle_warm(child))

    def _handle_exit(self, child: Child, code: int) -> None:
        try:
            if child is self._spare:
                self._spare = None  # the next one after the worker's next crash: spares could crash in a loop
            elif child is self._active:
                assert child.worker is not None
                killed = self._oom_kills.is_oom_kill(code)
                crashed_at = child.find_crash_location(code)
                reason = "out of memory: killed by the kernel" if killed else describe_exit(code)
                successor = child.read_successor()
                if successor is None:
                    end = code, reason, killed, crashed_at
                    self._ask(messages.WorkerExited(self.identity.slot, child.worker, *end))
                self._promote(successor)
        finally:
            child.close()

    def _handle_warm(self, child: Child) -> None:
        """Have a spare started, now that this no longer slows the worker's start down: the first one after
        `spare_after`, as a short job does without (two that import torch cost as much as a small training), a
        replacement at once."""
        child.warm = True
        if child is self._active and self._started > 1:
            self._prepare_spare(child)
        elif child is self._active:
            self._check_memory(child)
            self._call_later(self.spec.spare_after, lambda: self._prepare_spare(child))

    def _check_memory(self, child: Child) -> None:
        """Check the memory, and again later until a shortage was reported: training needs more than a warm process."""
        if child is not self._active:
            return
        spare = self._spare.pid if self._spare is not None and self._spare.warm else None
        if shortage := self.find_shortage(child.pid, spare, fork_server_cache.pid):
            self._on_line(child, f"{SLOT_LINE_PREFIX}{shortage}")
        else:
            self._call_later(MEMORY_CHECK_EVERY, lambda: self._check_memory(child))

    def _prepare_spare(self, child: Child) -> None:
        if child is self._active and self._spare is None:
            try:
                self._spare = self._start_child()
            except Exception as error:  # as when descriptors run out; the worker trains on without a spare
                why = f"{type(error).__name__}: {error}"
                self._on_line(child, f"{SLOT_LINE_PREFIX}no spare was started: {why}")
                self._call_later(SPARE_RETRY, lambda: self._prepare_spare(child))

    def _execute(self, commands: SlotCommands) -> None:
        for stop in commands.workers_to_stop:
            if self._active is not None and self._active.worker == stop.worker:
                if stop.kill:
                    self._active.kill()
                else:
                    self._stopping = self._active
                    self._call_later(STOP_GRACE, self._active.kill)
        self._reason = commands.release
        if self._reason is not None and self._active is not None and self._stopping is self._active:
            self._active.wait(STOP_GRACE)

    def _end(self, reason: str) -> None:
        self._reason = reason

    def _call_later(self, seconds: float, call: Callable[[], object]) -> None:
        self._later.append((self.clock.now() + seconds, call))

    def _next_event(self) -> Callable[[], object]:
        """What comes next: an event of another thread, or a call whose time has come."""
        if not self._later:
            return self._events.get()
        due = min(self._later, key=itemgetter(0))
        try:
            return self._events.get(timeout=max(0.0, due[0] - self.clock.now()))
        except queue.Empty:
            self._later.remove(due)
            return due[1]

    def _close(self) -> None:
        self._closing.set()
        for child in (self._active, self._spare):
            if child is not None:
                child.close()
        # R23 (kept commits): a slot that is given back in mid-job may be where the newest state is, and the next driver
        # goes on with what is left by a job that has lost its run or Spark.
        why = self._reason or ""
        others = messages.TAKEN_OVER, messages.SPARK_STOPPED
        is_done = why.startswith(messages.JOB_OVER) and not any(other in why for other in others)
        if self._kept is not None and is_done:
            self._kept.drop(self.spec.attempt)
        self._gpu_claims.close()
        self._lines_complete.set()
        self._threads["logs"].join(LAST_LINES_WAIT)
        self.client.close()
        for thread in self._threads.values():
            thread.join(THREAD_END_WAIT)

    # ---- any thread

    def _ask(self, request: messages.DriverRequest[R], hold: float = 0.0) -> R:
        return self.client.ask(request, hold, max(0.0, self._seconds_left()))

    def _seconds_left(self) -> float:
        """Until the slot ends: R12 (driver silence). Heartbeats count, since other requests may be held for long."""
        last_seen = max(self._registered_at, self.client.last_answered_at())
        return last_seen + self.spec.driver_timeout - self.clock.now()

    # ---- other threads

    def _on_line(self, child: Child, line: str) -> None:
        self._lines.put((child.worker, line))

    def _watch(self) -> None:
        """Poll for commands. The slot ends when the driver was silent for `driver_timeout`: R12 (driver silence)."""
        seen = 0
        while not self._closing.is_set():
            try:
                commands = self._ask(WatchSlot(self.identity.slot, seen), MAX_POLL_SECONDS)
            except Exception as error:
                if self._closing.is_set():
                    return
                is_final = isinstance(error, ElasticError) and not isinstance(error, DriverUnreachable)
                if self._seconds_left() < 0.0 or is_final:
                    self._events.put(partial(self._end, str(error)))
                    return
                self._closing.wait(0.2)
                continue
            seen = commands.seen
            self._events.put(partial(self._execute, commands))

    # The slot sends heartbeats for its training process: a held GIL does not silence another process, which also sees
    # when the child is stopped.
    def _send_heartbeats(self) -> None:
        failed = ""
        while True:
            try:
                if not self._await_heartbeat():
                    return
                child = self._active
                heartbeat = self._create_heartbeat(child)
                patience = HEARTBEAT_PATIENCE * self._heartbeat_every
                self._heartbeat_every = self.client.ask(heartbeat, patience=patience).heartbeat_interval
                if child is not None:
                    child.reader.record_driver_seen(self.client.last_answered_at())
                failed = ""
            except ElasticError:
                continue  # the watch thread handles a silent driver
            except Exception as error:
                description = f"a heartbeat was not sent: {type(error).__name__}: {error}"
                if description != failed:  # once, as long as it lasts
                    self._lines.put((None, f"{SLOT_LINE_PREFIX}{description}"))
                failed = description

    def _await_heartbeat(self) -> bool:
        """Wait until a heartbeat is due. False: the slot ends."""
        left = self._heartbeat_every
        check_every = CHECK_EVERY if left <= MAX_HEARTBEAT_INTERVAL else left
        while left > 0.0:
            if self._closing.wait(min(left, check_every)):
                return False
            left -= check_every
            if self._active is not None and self._has_news(self._active):
                break
        return True

    def _has_news(self, child: Child) -> bool:
        first, last = REPORT_WAITS
        return child.state() == STOPPED or first <= child.reader.read_bitwise_wait(self.clock.now()) < last

    def _create_heartbeat(self, child: Child | None) -> messages.Heartbeat:
        slot = self.identity.slot
        if child is None:
            return messages.Heartbeat(slot)
        state = child.state()
        stopped = state in NOT_RUNNING
        sample = child.read_sample(self.clock.now(), stopped)
        is_stalled = stopped or (not sample.is_waiting and sample.seconds > STACK_AFTER)
        stack = sample.stack if is_stalled else ""
        did = sample.is_waiting, sample.seconds, stack, sample.bitwise
        return messages.Heartbeat(slot, child.worker, state, *did)

    def _send_lines(self) -> None:
        while not self._lines_complete.wait(SEND_LINES_EVERY):
            self._send_waiting_lines()
        self._send_waiting_lines()

    def _send_waiting_lines(self) -> None:
        while batch := self._take_lines():
            for worker, lines in batch.items():
                with suppress(Exception):  # losing lines, which are for people, must not hurt training
                    self._ask(LogLines(self.identity.slot, worker, None, tuple(lines)))

    def _take_lines(self) -> dict[WorkerId | None, list[str]]:
        batch: dict[WorkerId | None, list[str]] = {}
        count = characters = 0
        while count < LINES_AT_ONCE and characters < CHARACTERS_AT_ONCE and not self._lines.empty():
            worker, line = self._lines.get()
            batch.setdefault(worker, []).append(line)
            count, characters = count + 1, characters + len(line)
        return batch
