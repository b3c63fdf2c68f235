"""Hands everything that happens in a job to its listeners, and names members that keep the others waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from spark_elastic.clock import Clock
from spark_elastic.driver.gang_scheduler import GangScheduler
from spark_elastic.driver.ports import Post
from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.listener import AsyncNotifier, Commands, JobListener
from spark_elastic.monitoring.logs import ANNOUNCED
from spark_elastic.protocol.commands import AbortWorld, NotifyUser, PublishWorld
from spark_elastic.protocol.driver.state import DriverState, JobStage
from spark_elastic.protocol.events import DriverEvent, Received, WorkerStalled
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import NOT_RUNNING, SLOT_LINE_PREFIX, Fence, Member, SlotId, WorkerId, World
from spark_elastic.rendezvous.messages import LogLines, Report

log = logging.getLogger("spark_elastic")

MAX_OUTPUT = 16 << 20  # characters of output that wait
OVERFLOW = "%d messages with workers' output were dropped: they came faster than they were read"
STALL_CHECK_INTERVAL = 0.2  # seconds
MAX_OTHER_HEARTBEATS = 100  # heartbeats that are kept of slots outside of the current world
MAX_MISSED_HEARTBEATS = 2.5  # of a slot that is not silent
STATES = {
    "R": "runs (R)",
    "S": "sleeps (S)",
    "D": "waits for a device (D)",
    "T": "is stopped (T)",
    "Z": "has ended (Z)",
}
ENDED = ("", "X", "Z")  # states of a process that is no more


class StallDetector(JobListener):
    """Names members that keep the others waiting for `stall_after` seconds, once per world: in the log, and to the
    driver machine. Driver's thread. heartbeat_interval: seconds between a slot's heartbeats, for a number of slots."""

    def __init__(self, post: Post, stall_after: float, heartbeat_interval: Callable[[int], float]) -> None:
        self._post, self._stall_after, self._heartbeat_interval = post, stall_after, heartbeat_interval
        self._heartbeats: dict[SlotId, tuple[float, Heartbeat]] = {}  # the newest, and when each came
        self._named: set[tuple[Fence, WorkerId]] = set()
        self._next_check = 0.0

    def on_transition(self, event: DriverEvent, commands: Commands, state: DriverState | None) -> None:
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
            if (stall.fence, stall.worker) not in self._named:
                self._named.add((stall.fence, stall.worker))
                log.warning("%s", stall.text)
                self._post(stall)


def find_stalls(
    world: World,
    heartbeats: Mapping[SlotId, tuple[float, Heartbeat]],
    now: float,
    after: float,
    since: float,
    interval: float,
    ended_at: float | None = None,
) -> list[WorkerStalled]:
    """The members that have kept another waiting for `after` seconds or more. Pure.

    A member waits when its main thread is in a collective or asks for its next world. If a member has waited for long,
    another one has not come: it works on, is stopped, or its slot is silent. heartbeats: the newest of each slot, and
    when it came. since: when the world began. ended_at: when it ended; members that run on in it keep the next world
    waiting, even if no other is left whose heartbeats could say that it waits."""
    silent = MAX_MISSED_HEARTBEATS * max(1.0, interval)
    fresh = {slot: heartbeat for slot, (came, heartbeat) in heartbeats.items() if now - came <= silent}
    waits = (_get_wait_seconds(member, fresh.get(member.slot)) for member in world.members)
    longest = min(now - since, max(waits))
    no_wait_known = ended_at is not None and longest < after
    if ended_at is not None and no_wait_known:
        longest = now - ended_at
    stalls: list[WorkerStalled] = []
    if longest < after:
        return stalls
    for member in world.members:
        came, heartbeat = heartbeats.get(member.slot, (since, None))
        if no_wait_known and (member.slot not in fresh or heartbeat is None or heartbeat.state in ENDED):
            continue  # it is lost, not late
        is_own = heartbeat is not None and heartbeat.worker == member.worker
        if heartbeat is None or member.slot not in fresh:
            how = f"its slot has been silent for {now - came:.1f} s"
        elif not is_own or (
            heartbeat.state not in NOT_RUNNING and (heartbeat.waits or heartbeat.seconds < after / 2)
        ):
            continue
        else:
            how = f"its process {STATES.get(heartbeat.state, f'is in state {heartbeat.state}')}"
        stack = heartbeat.stack if heartbeat is not None and is_own else ""
        text = f"rank {member.rank} (worker {member.worker}, host {member.host}) has kept others waiting for "
        text += f"{longest:.1f} s: {how}" + (f", last seen in {stack}" if stack else "")
        stalls.append(WorkerStalled(now, member.worker, world.fence, text))
    return stalls


def _get_wait_seconds(member: Member, heartbeat: Heartbeat | None) -> float:
    """For how long a member is known to wait; 0.0 for one that does not, or cannot say."""
    if heartbeat is None or heartbeat.worker != member.worker:
        return 0.0
    return heartbeat.seconds if heartbeat.waits and heartbeat.state not in NOT_RUNNING else 0.0


class JobMonitor:
    """Hands what happens in a job to its observers and to the user's listener. None of them can harm the job.

    Observers are our own, beside the history: they are called directly and must not block. The user's listener may
    block: `notifier` calls it, and `output` for what workers print. scheduler: told of
    each world and of lacking slots, on the driver's thread. Of failures in a row the first is logged."""

    def __init__(
        self,
        listener: JobListener,
        clock: Clock,
        observers: Sequence[JobListener] = (),
        scheduler: GangScheduler | None = None,
    ) -> None:
        self._listener, self._scheduler = listener, scheduler
        self._lacks_slots = False  # what the scheduler was told last
        self._ranks: dict[str, int] = {}  # of the current world, by worker
        self.notifier, self.output = AsyncNotifier(), AsyncNotifier(MAX_OUTPUT, OVERFLOW)
        tell = self.notifier.submit
        self.history = JobHistory(clock, lambda change: tell(lambda: listener.on_message(str(change))))
        self._observers = (self.history, *observers)
        self._failed: set[int] = set()  # ids of those that have failed when they were called last

    def on_transition(self, event: DriverEvent, commands: Commands, state: DriverState | None) -> None:
        """Called on the driver's thread, before the commands are executed."""
        if state is not None and state.lacks_slots != self._lacks_slots:
            self._lacks_slots = state.lacks_slots
            self._notify_scheduler(lambda scheduler: scheduler.report_shortage(state.lacks_slots))
        self._observe(lambda observer: observer.on_transition(event, commands, state))
        for command in commands:
            match command:
                case PublishWorld(reason, world):
                    self._notify_scheduler(lambda scheduler: scheduler.finish_gathering())
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

    def on_logs(self, message: LogLines) -> None:
        """What a worker printed. Called on the server's thread, which a blocked terminal must not delay."""
        self.output.submit(partial(self.on_lines, message), sum(map(len, message.lines)))

    def on_lines(self, message: LogLines) -> None:
        worker = message.worker or ""
        rank = self._ranks.get(worker)
        for line in message.lines:
            self._observe(lambda observer, line=line: observer.on_output(worker, rank, line))  # type: ignore[misc]
            if line.startswith(SLOT_LINE_PREFIX):  # the slot's own line, which the user must see
                log.warning("%s (slot %s)", line.removeprefix(SLOT_LINE_PREFIX), message.slot)
            else:
                self._call(self._listener, lambda shown, line=line: shown.on_output(worker, rank, line))  # type: ignore[misc]

    def on_report(self, report: Report) -> None:
        """What a worker reported. Called on the server's thread."""
        if self._ranks.get(report.worker) == 0:
            self._observe(lambda observer: observer.on_progress(report.numbers))
            self.notifier.submit_latest(lambda: self._listener.on_progress(report.numbers))

    def _announce(self, text: str, hook: Callable[[str], object]) -> None:
        log.info("%s", text, extra=ANNOUNCED)
        self.notifier.submit(partial(hook, text))

    def _notify_scheduler(self, call: Callable[[GangScheduler], None]) -> None:
        try:
            if self._scheduler is not None:
                call(self._scheduler)
        except Exception:
            told = "the scheduler of slots failed: other jobs of the application may wait for this one's end"
            log.exception(told)

    def _observe(self, call: Callable[[JobListener], None]) -> None:
        for observer in self._observers:
            self._call(observer, call)

    def _call(self, listener: JobListener, call: Callable[[JobListener], None]) -> None:
        """Log the first of a row of failures: with a full disk each line fails."""
        try:
            call(listener)
            self._failed.discard(id(listener))
        except Exception:
            if id(listener) not in self._failed:
                log.exception("%s failed", type(listener).__name__)
            self._failed.add(id(listener))
