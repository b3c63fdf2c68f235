"""What becomes of a job's worlds, and what its workers print and report, handed on to everybody who is told.

Called by the driver loop and by the server's threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from spark_elastic.clock import Clock
from spark_elastic.driver.stall_watch import StallWatch
from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.log_files import LogFiles
from spark_elastic.monitoring.log_forwarding import TOLD, AsyncNotifier
from spark_elastic.monitoring.report import WorldChange
from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.driver.state import DriverState
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.types import World
from spark_elastic.rendezvous.messages import SLOT_LINE_PREFIX, LogLines, Report

# Who tells people how a job goes: the interface, and the one that says nothing.


class JobListener(Protocol):
    """Tells people how the job goes. Called from several threads, which may be held up by it."""

    def log(self, rank: int | None, line: str) -> None: ...

    def progress(self, numbers: Mapping[str, Any]) -> None: ...

    def world(self, size: int, reason: str) -> None: ...

    def tell(self, text: str) -> None:
        """A sentence for people: a join, loss, drain or recovery with its cost, once it is over."""
        ...


class NullListener:
    """A narrator that says nothing."""

    def log(self, rank: int | None, line: str) -> None:
        """Says nothing."""

    def progress(self, numbers: Mapping[str, Any]) -> None:
        """Says nothing."""

    def world(self, size: int, reason: str) -> None:
        """Says nothing."""

    def tell(self, text: str) -> None:
        """Says nothing."""


log = logging.getLogger("spark_elastic")


@dataclass(frozen=True)
class WorldSpan:
    """A world and when it began, in seconds since the launch."""

    seconds: float
    size: int
    reason: str


@dataclass
class JobMonitor:
    """Keeps who is which rank, for log prefixes and the history of worlds. A narrator that fails, or blocks, harms no
    job: neither the driver's loop nor the server's wait for it. gathered: called at each world. lacks: whenever the job
    begins to lack slots for its next world, or has enough again."""

    narrator: JobListener
    clock: Clock
    started: float
    stalls: StallWatch
    files: LogFiles | None = None
    gathered: Callable[[], None] = lambda: None
    lacks: Callable[[bool], None] = lambda slots: None
    teller: AsyncNotifier = field(default_factory=AsyncNotifier)
    chronicle: JobHistory = field(init=False)
    worlds: list[WorldSpan] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    failing: bool = False  # the narrator, at its last line
    short: bool = False  # what `lacks` was told last

    def __post_init__(self) -> None:
        self.chronicle = JobHistory(self.started, self.changed)

    def turn(self, event: DriverEvent, commands: Sequence[DriverCommand], after: DriverState | None) -> None:
        """A turn of the driver machine; arguments as for the journal."""
        if after is not None and after.lacks_slots != self.short:
            self.short = after.lacks_slots
            self.lacks(self.short)
        self.chronicle.turn(event, commands, after)

    def world(self, world: World) -> None:
        self.gathered()
        self.ranks = {member.worker: member.rank for member in world.members}
        self.stalls.world(world)
        self.worlds.append(WorldSpan(self.clock.now() - self.started, world.size, world.reason))
        self.teller.tell(lambda: self.narrator.world(world.size, world.reason))

    def changed(self, change: WorldChange) -> None:
        self.teller.tell(lambda: self.narrator.tell(str(change)))

    def over(self, reason: str) -> None:
        self.stalls.over()
        log.info("%s", reason)

    def announces(self, text: str) -> None:
        """Tell a sentence to the log and to the narrator."""
        log.info("%s", text, extra=TOLD)
        self.teller.tell(lambda: self.narrator.tell(text))

    def lines(self, lines: LogLines) -> None:
        """What workers printed. Called in a thread of its own."""
        rank = self.ranks.get(lines.worker)
        if self.files is not None:
            self.files.add(lines.worker, rank, lines.lines)
        for line in lines.lines:
            if line.startswith(SLOT_LINE_PREFIX):  # the slot's own line, which the user must see
                log.warning("%s (slot %s)", line.removeprefix(SLOT_LINE_PREFIX), lines.slot)
                continue
            self._show(rank, line)

    def report(self, report: Report) -> None:
        if self.ranks.get(report.worker) == 0:
            try:
                self.chronicle.heard(self.clock.now(), report.numbers)
            except Exception:
                log.exception("the chronicle failed")
            self.teller.progress(lambda: self.narrator.progress(report.numbers))

    def _show(self, rank: int | None, line: str) -> None:
        try:
            self.narrator.log(rank, line)
            self.failing = False
        except Exception:
            if not self.failing:  # a full disk fails at each line; one traceback says so
                log.exception("the narrator failed")
            self.failing = True
