"""Composition root: puts server, driver loop, launcher and discovery together and waits for the end of the job.

`launch` runs a program over Spark; `supervise` does the same over any launcher, and is what runs without a JVM.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import Together, steered
from spark_elastic.driver.effects import Effects
from spark_elastic.driver.gathering import GatherTurn, application_of
from spark_elastic.driver.inbox import Inbox
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.loop import DriverLoop
from spark_elastic.driver.ports import Contact, Discovery, Launcher
from spark_elastic.driver.stall_watch import StallWatch
from spark_elastic.errors import (
    FailureBudgetExceeded,
    JobCancelled,
    JobFailed,
    NotEnoughWorkers,
    OutOfMemory,
    TimeLimitReached,
    WorkerFailed,
)
from spark_elastic.observe.changes import WorldChange
from spark_elastic.observe.chronicle import Chronicle
from spark_elastic.observe.log_files import LogFiles
from spark_elastic.observe.report import JobReport
from spark_elastic.observe.status_page import pages
from spark_elastic.observe.teller import Teller
from spark_elastic.observe.told_log import TOLD
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import End, Outcome
from spark_elastic.protocol.events import CancelRequested
from spark_elastic.protocol.pace import beat_every
from spark_elastic.protocol.types import Checkpoint, Limits, World
from spark_elastic.rendezvous import tls
from spark_elastic.rendezvous.descriptors import make_room
from spark_elastic.rendezvous.messages import OWN_WORDS, LogLines, Report
from spark_elastic.rendezvous.server import Recipients, RendezvousServer
from spark_elastic.rendezvous.serving import Bind
from spark_elastic.rendezvous.status_door import StatusDoor
from spark_elastic.state.held_run import HeldRun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic")

STOP_WITHIN = 5.0  # seconds in which a job is gone once it ends, however it ends
FIRST_ATTEMPT = 1


class Narrator(Protocol):
    """Tells people how the job goes. Called from several threads, which may be held up by it but for `world`."""

    def log(self, rank: int | None, line: str) -> None: ...

    def progress(self, numbers: Mapping[str, Any]) -> None: ...

    def world(self, size: int, reason: str) -> None:
        """A world was published. Must return at once: the driver's loop waits."""
        ...

    def tell(self, text: str) -> None:
        """A sentence for people: a join, loss, drain or recovery with its cost, once it is over."""
        ...


class Silent:
    """A narrator that says nothing."""

    def log(self, rank: int | None, line: str) -> None:
        """Nothing."""

    def progress(self, numbers: Mapping[str, Any]) -> None:
        """Nothing."""

    def world(self, size: int, reason: str) -> None:
        """Nothing."""

    def tell(self, text: str) -> None:
        """Nothing."""


class Gathering:
    """Tells a narrator everything, and ends its job's turn with the first world."""

    def __init__(self, narrator: Narrator, turn: GatherTurn) -> None:
        self.log = narrator.log
        self.progress = narrator.progress
        self.tell = narrator.tell
        self._narrator = narrator
        self._turn = turn

    def world(self, size: int, reason: str) -> None:
        self._turn.gathered()
        self._narrator.world(size, reason)


@dataclass(frozen=True)
class WorldSpan:
    """A world and when it began, in seconds since the launch."""

    seconds: float
    size: int
    reason: str


@dataclass(frozen=True)
class LaunchResult:
    """results: what the workers returned, JSON text in rank order. story: events and commands, a line each.

    report: where the time went.
    """

    results: tuple[str, ...]
    worlds: tuple[WorldSpan, ...]
    story: tuple[str, ...]
    report: JobReport = field(default_factory=JobReport)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The driver's side of a job: where its server listens, whom it lets in, and what outlives all workers.

    encrypted: over TLS, unless the configuration says otherwise. admit: why a host with these facts cannot take part,
    or None. run: what the job's checkpoints belong to and where it goes on from; None: no checkpoints. key: the job's,
    where others have it already.
    """

    bind: str = "127.0.0.1"
    advertise: str | None = None
    encrypted: bool = False
    admit: Callable[[dict[str, Any]], str | None] = field(default=lambda facts: None)
    run: HeldRun | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass
class _Audience:
    """Keeps who is which rank, for log prefixes and the history of worlds. A narrator that fails, or blocks, harms no
    job: neither the driver's loop nor the server's wait for it."""

    narrator: Narrator
    clock: Clock
    started: float
    stalls: StallWatch
    files: LogFiles | None = None
    teller: Teller = field(default_factory=Teller)
    chronicle: Chronicle = field(init=False)
    worlds: list[WorldSpan] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chronicle = Chronicle(self.started, self.changed)

    def world(self, world: World) -> None:
        self.ranks = {member.worker: member.rank for member in world.members}
        self.stalls.world(world)
        self.worlds.append(WorldSpan(self.clock.now() - self.started, world.size, world.reason))
        self._call(lambda: self.narrator.world(world.size, world.reason))

    def changed(self, change: WorldChange) -> None:
        self.teller.tell(lambda: self.narrator.tell(str(change)))

    def over(self, reason: str) -> None:
        self.stalls.over()
        log.info("%s", reason)

    def announces(self, text: str) -> None:
        """For those who read logs and those who watch."""
        log.info("%s", text, extra=TOLD)
        self.teller.tell(lambda: self.narrator.tell(text))

    def lines(self, lines: LogLines) -> None:
        """From a thread of their own."""
        rank = self.ranks.get(lines.worker)
        if self.files is not None:
            self.files.add(lines.worker, rank, lines.lines)
        for line in lines.lines:
            if line.startswith(OWN_WORDS):  # a slot's, not its worker's: what the user must know
                log.warning("%s (slot %s)", line.removeprefix(OWN_WORDS), lines.slot)
                continue
            self._call(partial(self.narrator.log, rank, line))

    def report(self, report: Report) -> None:
        if self.ranks.get(report.worker) == 0:
            self._call(lambda: self.chronicle.heard(self.clock.now(), report.numbers))
            self.teller.progress(lambda: self.narrator.progress(report.numbers))

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            log.exception("the narrator failed")


def launch(  # noqa: PLR0913 - the root where all parts meet
    spark: SparkSession,
    program: object,
    limits: Limits,
    config: ElasticConfig,
    name: str,
    preload: tuple[str, ...] = (),
    narrate: Narrator | None = None,
    run: HeldRun | None = None,
) -> LaunchResult:
    """Run `program` (a `worker.program.Program`, shipped by cloudpickle) on elastic workers over Spark.

    Raises:
        JobFailed: with its subclasses; JobCancelled: the user or Spark ended it.
    """
    from spark_elastic.spark.admission import admit
    from spark_elastic.spark.carrying import broadcast
    from spark_elastic.spark.driver_address import bind_of
    from spark_elastic.spark.executors import ExecutorWatch
    from spark_elastic.spark.gpu_slots import profile_of
    from spark_elastic.spark.launcher import SparkLauncher
    from spark_elastic.spark.memory import room_of
    from spark_elastic.spark.own_facts import facts
    from spark_elastic.spark.settings import ssl_enabled, warn
    from spark_elastic.spark.shipping import ship
    from spark_elastic.spark.slot_task import tasks_of

    sc = spark.sparkContext
    conf = sc.getConf()
    settings = dict(conf.getAll())
    bind = bind_of(conf, config)
    site = Site(
        bind=bind.host,
        advertise=bind.advertise,
        encrypted=ssl_enabled(settings),
        admit=admit(facts(), needs=tuple(name for name in preload if "." not in name)),
        run=run,
    )
    warn(settings, sc)
    room = room_of(settings)
    if config.ship:
        ship(sc)
    shipped = broadcast(sc, cloudpickle.dumps(program), "the program")

    clock = SystemClock()
    profile = profile_of(settings, sc.emptyRDD().withResources)
    launcher = SparkLauncher(sc, tasks_of(shipped, preload, config, room), clock, profile)
    try:
        with GatherTurn(application_of(sc), name, limits, clock) as turn:
            watch = Together(ExecutorWatch(sc, clock), turn)
            return supervise(
                launcher, watch, site, limits, config, name, Gathering(narrate or Silent(), turn)
            )
    finally:
        _forget(shipped)


def supervise(
    launcher: Launcher,
    discovery: Discovery,
    site: Site,
    limits: Limits,
    config: ElasticConfig,
    name: str,
    narrate: Narrator | None = None,
) -> LaunchResult:
    """Drive one job to its end over any launcher. Blocks; Ctrl-C ends the job within `STOP_WITHIN` seconds."""
    clock = SystemClock()
    discovery = steered(discovery, config.host_discovery, config.handle, clock)
    narrator = narrate or Silent()
    inbox: Inbox = Inbox()
    pace = partial(beat_every, limits.lease)
    stalls = StallWatch(inbox.put, clock, config.stall_after, pace)
    run = site.run
    files = _log_files(run, config, clock)
    audience = _Audience(narrator, clock, clock.now(), stalls, files)
    journal = Journal(config.journal, audience.chronicle.turn)
    key = site.key or secrets.token_bytes(32)
    recipients = Recipients(stalls.post, audience.lines, site.admit, audience.report, pace)
    bind = Bind(site.bind, config.driver_port, site.advertise, tls.chosen(config, site.encrypted))
    attempt, checkpoints = (run.attempt, run.checkpoints) if run is not None else (FIRST_ATTEMPT, ())
    door = StatusDoor(pages(audience.chronicle, name, clock), clock) if config.status_page else None
    server = RendezvousServer(key, attempt, recipients, clock, bind, door)
    effects = Effects(server, launcher, audience, run.publish if run is not None else _unpublished)
    first = driver_machine.initial(limits, attempt, checkpoints)
    loop = DriverLoop(first, inbox, effects.carry_out, clock, journal)
    make_room(limits.max_workers)
    server.start()
    if door is not None:
        audience.announces(f"the status page of {name}: {door.url(server.url)}")
    with (
        ExitStack() as closing
    ):  # last in, first out; an interrupt while one closes does not spare the others
        closing.enter_context(audience.teller)
        if run is not None:
            closing.callback(run.close)
            run.start(lambda reason: inbox.put(CancelRequested(clock.now(), reason)))
        if files is not None:
            closing.callback(files.close)
            files.start()
        closing.callback(server.close)
        closing.callback(loop.close)
        closing.callback(discovery.close)
        closing.callback(_close_launcher, launcher)
        closing.callback(server.end, "the job is over")
        launcher.start(Contact(server.address, key, attempt, name, server.certificate), inbox.put)
        discovery.start(inbox.put)
        loop.start()
        end = _await_end(loop)
    report = audience.chronicle.report(clock.now())
    return LaunchResult(_results(end), tuple(audience.worlds), tuple(journal.story()), report)


def bounds(config: ElasticConfig, num_workers: int, min_workers: int, max_workers: int) -> Limits:
    """The limits of a job: the numbers of its workers, and every setting that has the name of a limit."""
    names = Limits.__dataclass_fields__.keys() & ElasticConfig.__dataclass_fields__.keys()
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    return Limits(num_workers, min_workers, max_workers, **settings)


def _unpublished(kept: tuple[Checkpoint, ...]) -> None:
    """A job without a run has nowhere to write, and writes nothing."""


def _log_files(run: HeldRun | None, config: ElasticConfig, clock: Clock) -> LogFiles | None:
    if run is None or not config.log_bytes:
        return None
    return LogFiles(run.store, run.run_id, run.attempt, config.log_bytes, clock)


def _close_launcher(launcher: Launcher) -> None:
    left = launcher.close(STOP_WITHIN)
    if left:
        log.warning("still running at Spark %.0f s after the job's end: %s", STOP_WITHIN, ", ".join(left))


def _await_end(loop: DriverLoop) -> End:
    try:
        while True:
            end = loop.wait(1.0)
            if end is not None:
                return end
    except BaseException:
        loop.cancel("the caller was interrupted")
        loop.wait(STOP_WITHIN / 5)
        raise


def _results(end: End) -> tuple[str, ...]:
    match end.outcome:
        case Outcome.SUCCESS:
            return end.results
        case Outcome.USER_ERROR:
            raise WorkerFailed(f"{end.reason}\n{end.detail}")
        case Outcome.NOT_ENOUGH_WORKERS:
            raise NotEnoughWorkers(end.reason)
        case Outcome.OUT_OF_MEMORY:
            raise OutOfMemory(f"{end.reason}\n{end.detail}".rstrip())
        case Outcome.FAILURE_BUDGET | Outcome.RESET_LIMIT:
            raise FailureBudgetExceeded(f"{end.reason}\n{end.detail}".rstrip())
        case Outcome.TIME_LIMIT:
            raise TimeLimitReached(end.reason)
        case Outcome.CANCELLED:
            raise JobCancelled(end.reason)
    raise JobFailed(end.reason)


def _forget(shipped: Any) -> None:
    try:
        shipped.destroy()
    except Exception as error:  # a stopped SparkContext has dropped its broadcasts already
        log.debug("broadcast not destroyed: %s", error)
