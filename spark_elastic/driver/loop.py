"""The driver loop: one thread takes events from a queue, gives them to the pure machine and executes its commands.

The thread owns the machine's state; all other threads only post events.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from spark_elastic.clock import Clock
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.ports import Launcher
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import DriverCommand, End, JobOutcome
from spark_elastic.protocol.events import CancelRequested, DriverEvent, Tick, is_heartbeat
from spark_elastic.protocol.types import Checkpoint
from spark_elastic.rendezvous.server import RendezvousServer

log = logging.getLogger("spark_elastic.driver")

TICK_SECONDS = 0.05  # seconds; deadlines are met within it
JOIN_TIMEOUT = 5.0  # seconds for the command that is being carried out when the loop is closed
MANY_EVENTS = 16  # after which the loop pauses
PAUSE = 0.003  # seconds


class EventQueue:
    """Events in the order in which they came; None ends the loop. Any thread puts, only the driver loop takes.

    Most events are heartbeats, which do not wake the loop: taking the interpreter lock from the server's thread costs
    more than they do. For that reason the server adds events and wakes it for many at once, and the loop also pauses
    after many: thousands of workers answer at once."""

    def __init__(self) -> None:
        self._events: deque[DriverEvent | None] = deque()
        self._wakeup = threading.Event()
        self._never = threading.Event()
        self._in_a_row = 0  # events since the loop last waited for one
        self._has_news = False  # an event was added for which the loop is to be woken

    def put(self, event: DriverEvent | None) -> None:
        """Never blocks."""
        self.add(event)
        self.wake()

    def add(self, event: DriverEvent | None) -> None:
        """Without waking the loop."""
        self._events.append(event)
        if event is None or not is_heartbeat(event):
            self._has_news = True

    def wake(self) -> None:
        if self._has_news:
            self._has_news = False  # before the loop is told, so that another thread's news are not lost
            self._wakeup.set()

    def get(self, timeout: float) -> DriverEvent | None:
        """The oldest event; waits up to `timeout` seconds for one that is no heartbeat. Raises queue.Empty."""
        self._wakeup.clear()
        if not self._events:
            if self._in_a_row > MANY_EVENTS:
                self._never.wait(min(PAUSE, timeout))
            self._in_a_row = 0
            self._wakeup.wait(timeout)
        if not self._events:
            raise queue.Empty
        self._in_a_row += 1
        return self._events.popleft()


class DriverLoop:
    """Runs the driver machine until it ends the job."""

    def __init__(
        self,
        initial: tuple[driver_machine.DriverState, tuple[DriverCommand, ...]],
        events: EventQueue,
        execute: Callable[[DriverCommand], None],
        clock: Clock,
        journal: Journal,
    ) -> None:
        self._state, self._first = initial
        self._events, self._clock, self._journal = events, clock, journal
        self._execute_command = execute
        self._next_tick = 0.0
        self._count = 0  # of the events so far
        self._ended = threading.Event()
        self._outcome: End | None = None
        self._thread = threading.Thread(target=self._run, name="spark-elastic-driver", daemon=True)

    def start(self) -> None:
        """Raises InvalidInput where the journal cannot be written."""
        self._journal.begin(self._state, self._first)
        self._thread.start()

    def wait(self, timeout: float) -> End | None:
        """The job's end, or None while the job runs."""
        self._ended.wait(timeout)
        return self._outcome

    def cancel(self, reason: str) -> None:
        self._events.put(CancelRequested(self._clock.now(), reason))

    def close(self) -> None:
        """Stop the thread; events after this are lost."""
        self._events.put(None)
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT)
        self._journal.close()

    def _run(self) -> None:
        try:
            for command in self._first:
                self._execute(command, "start")
            while (event := self._next()) is not None:
                self._count += 1
                # Launchers and discovery have clocks of their own, which do not stand still while this process does.
                event = replace(event, now=self._clock.now(), id=f"e{self._count}")
                for command in self._step(event):
                    self._execute(command, event.id)
        except Exception as error:  # the machine's own defect must end the job, not hang it
            log.exception("the driver loop failed")
            self._finish(End(f"the driver loop failed: {error!r}", JobOutcome.DEFECT))

    def _step(self, event: DriverEvent) -> tuple[DriverCommand, ...]:
        try:
            self._state, commands = driver_machine.step(self._state, event)
        except Exception:
            self._journal.record(event, ())  # a replay meets the same defect
            raise
        self._journal.record(event, commands, self._state)
        return commands

    def _next(self) -> DriverEvent | None:
        """The next event; a tick whenever one is due, however busy the queue is."""
        now = self._clock.now()
        if now < self._next_tick:
            try:
                return self._events.get(timeout=self._next_tick - now)
            except queue.Empty:
                now = self._clock.now()
        self._next_tick = now + TICK_SECONDS
        return Tick(now)

    def _execute(self, command: DriverCommand, cause: str) -> None:
        log.debug("%s: %s", cause, command)
        self._execute_command(command)
        if isinstance(command, End):
            self._finish(command)

    def _finish(self, end: End) -> None:
        if self._outcome is None:
            self._outcome = end
            self._ended.set()


def execute(
    server: RendezvousServer,
    launcher: Launcher,
    publish: Callable[[tuple[Checkpoint, ...]], None],
    command: DriverCommand,
) -> None:
    """Execute one of the machine's commands without blocking. publish: publishes checkpoints, newest first."""
    match command:
        case do.LaunchSlot(_, launch):
            launcher.launch(launch)
        case do.PublishWorld(_, world):
            server.publish(world)
        case do.AbortWorld(reason, fence):
            server.abort(fence, reason)
        case do.AnnounceChange(_, version):
            server.announce(version)
        case do.StopWorker(reason, worker, kill):
            server.stop_worker(worker, reason, kill)
        case do.ReleaseSlot(reason, slot):
            server.release_slot(slot, reason)
        case do.PublishCheckpoint(_, checkpoints):
            publish(checkpoints)
        case do.End(reason):
            server.end(reason)
