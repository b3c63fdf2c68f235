"""Hands everything that happens in a job to its listeners, and names members that keep the others waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from spark_elastic.clock import Clock
from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.listener import AsyncNotifier, JobListener
from spark_elastic.monitoring.logs import ANNOUNCED
from spark_elastic.monitoring.report import WorldChange
from spark_elastic.protocol.commands import AbortWorld, DriverCommand, NotifyUser, PublishWorld
from spark_elastic.protocol.driver.stall import find_stalls
from spark_elastic.protocol.driver.state import DriverState, JobStage
from spark_elastic.protocol.events import DriverEvent, Received, WorkerStalled
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import SlotId, WorkerId
from spark_elastic.rendezvous.messages import SLOT_LINE_PREFIX, LogLines, Report

log = logging.getLogger("spark_elastic")

STALL_CHECK_INTERVAL = 0.2  # seconds
MAX_OTHER_HEARTBEATS = 100  # heartbeats that are kept of slots outside of the current world


class StallDetector(JobListener):
    """Names members that keep the others waiting, once per world: in the log, and to the driver machine.

    Runs on the driver's thread.

    Args:
        post: takes `WorkerStalled`.
        stall_after: how long others have to wait for a member before it is named, in seconds.
        heartbeat_interval: seconds between two heartbeats of a slot, for a number of slots.
    """

    def __init__(
        self,
        post: Callable[[DriverEvent], None],
        stall_after: float,
        heartbeat_interval: Callable[[int], float],
    ) -> None:
        self._post = post
        self._stall_after = stall_after
        self._heartbeat_interval = heartbeat_interval
        # The newest of each slot, and when the driver received it.
        self._heartbeats: dict[SlotId, tuple[float, Heartbeat]] = {}
        self._named: set[tuple[int, WorkerId]] = set()  # generations and members
        self._next_check = 0.0

    def on_transition(
        self, event: DriverEvent, commands: Sequence[DriverCommand], state: DriverState | None
    ) -> None:
        if not isinstance(event, Received) or not isinstance(event.message, Heartbeat):
            return
        self._heartbeats[event.message.slot] = event.now, event.message
        has_members = state is not None and state.stage in (JobStage.RUNNING, JobStage.REGROUPING)
        if state is not None and has_members and event.now >= self._next_check:
            self._next_check = event.now + STALL_CHECK_INTERVAL
            self._check(state, event.now)

    def _check(self, state: DriverState, now: float) -> None:
        world, timers = state.world, state.timers
        assert world is not None
        # Slots come and go for as long as a job lasts.
        if len(self._heartbeats) > 2 * world.size + MAX_OTHER_HEARTBEATS:
            slots = {member.slot for member in world.members}
            self._heartbeats = {slot: seen for slot, seen in self._heartbeats.items() if slot in slots}
        interval = self._heartbeat_interval(len(self._heartbeats))
        # While its members are to come back for the next world.
        since, ended_at = timers.published_at, timers.leaving_since if state.current.break_reason else None
        for stall in find_stalls(world, self._heartbeats, now, self._stall_after, since, interval, ended_at):
            key = world.fence.generation, stall.member.worker
            if key not in self._named:
                self._named.add(key)
                log.warning("%s", stall.text)
                self._post(WorkerStalled(now, stall.member.worker, world.fence, stall.text))


class JobMonitor:
    """Hands what happens in a job to its observers and to the user's listener. None of them can harm the job.

    Observers are our own: they are called directly and must not block. The user's listener may block: `notifier` calls
    it, except for output, which the server delivers on a separate thread. Of an observer, only the first failure is
    logged. A hook that fails is logged and called again.

    Args:
        observers: in addition to the job's history.
        on_gathered: called on the driver's thread for each world.
        on_slots_missing: called on the driver's thread whenever the job begins to lack slots for its next world
            (True), or has enough again (False).
    """

    def __init__(
        self,
        listener: JobListener,
        clock: Clock,
        observers: Sequence[JobListener] = (),
        on_gathered: Callable[[], None] = lambda: None,
        on_slots_missing: Callable[[bool], None] = lambda missing: None,
    ) -> None:
        self._listener = listener
        self._on_gathered = on_gathered
        self._on_slots_missing = on_slots_missing
        self._slots_missing = False  # the newest value that `on_slots_missing` got
        self._ranks: dict[str, int] = {}  # of the current world, by worker
        self._output_failed = False  # the listener has failed at the last line of output
        self.notifier = AsyncNotifier()
        self.history = JobHistory(clock, self._announce_world_change)
        self._observers = (self.history, *observers)
        self._failed: set[JobListener] = set()  # observers that have failed

    def on_transition(
        self, event: DriverEvent, commands: Sequence[DriverCommand], state: DriverState | None
    ) -> None:
        """Called on the driver's thread, before the commands are executed."""
        if state is not None and state.lacks_slots != self._slots_missing:
            self._slots_missing = state.lacks_slots
            self._call_scheduler(lambda: self._on_slots_missing(state.lacks_slots))
        self._observe(lambda observer: observer.on_transition(event, commands, state))
        for command in commands:
            match command:
                case PublishWorld(reason, world):
                    self._call_scheduler(self._on_gathered)
                    self._ranks = {member.worker: member.rank for member in world.members}
                    self._announce(reason, partial(self._listener.on_world, world.size))
                case AbortWorld(reason):
                    log.info("%s", reason)
                    self.notifier.submit(partial(self._listener.on_world_broken, reason))
                case NotifyUser(reason):
                    self._announce(reason, self._listener.on_notice)

    def announce(self, text: str) -> None:
        """Pass a sentence to the log and to the listener."""
        self._announce(text, self._listener.on_message)

    def on_lines(self, message: LogLines) -> None:
        """What a worker printed. Called on a thread that may block."""
        worker = message.worker or ""
        rank = self._ranks.get(worker)
        for line in message.lines:
            self._observe(lambda observer, line=line: observer.on_output(worker, rank, line))  # type: ignore[misc]
            if line.startswith(SLOT_LINE_PREFIX):  # the slot's own line, which the user must see
                log.warning("%s (slot %s)", line.removeprefix(SLOT_LINE_PREFIX), message.slot)
            else:
                self._show_output(worker, rank, line)

    def on_report(self, report: Report) -> None:
        """What a worker reported. Called on the server's thread."""
        if self._ranks.get(report.worker) == 0:
            self._observe(lambda observer: observer.on_progress(report.numbers))
            self.notifier.submit_latest(lambda: self._listener.on_progress(report.numbers))

    def _announce(self, text: str, hook: Callable[[str], object]) -> None:
        log.info("%s", text, extra=ANNOUNCED)
        self.notifier.submit(partial(hook, text))

    def _announce_world_change(self, change: WorldChange) -> None:
        self.notifier.submit(lambda: self._listener.on_message(str(change)))

    def _call_scheduler(self, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception:
            log.exception(
                "the scheduler of slots failed: other jobs of the application may wait for this one's end"
            )

    def _observe(self, call: Callable[[JobListener], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                if observer not in self._failed:
                    log.exception("%s failed", type(observer).__name__)
                self._failed.add(observer)

    def _show_output(self, worker: str, rank: int | None, line: str) -> None:
        try:
            self._listener.on_output(worker, rank, line)
            self._output_failed = False
        except Exception:
            if not self._output_failed:  # a full disk fails at each line: log one traceback only
                log.exception("the job listener failed")
            self._output_failed = True
