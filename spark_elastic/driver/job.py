"""The composition root of a job: connects server, driver loop, launcher and discovery, and waits for the job's end.

It works over any launcher: `platforms` has those of Spark, `local` the one of plain processes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spark_elastic import errors
from spark_elastic.clock import RunningClock, SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import build_discovery, check_requests
from spark_elastic.driver.gang_scheduler import GangScheduler
from spark_elastic.driver.job_monitor import JobMonitor, StallDetector
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.loop import DriverLoop, EventQueue, execute
from spark_elastic.driver.ports import Discovery, Launcher
from spark_elastic.driver.run_board import RunBoard, Shown
from spark_elastic.errors import JobCancelled, JobFailed, StoreError
from spark_elastic.monitoring.job_history import build_status_pages
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.monitoring.logs import StoreLog, isolate_log_handlers
from spark_elastic.monitoring.report import JobReport, WorldChange, save_page
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import End, JobOutcome
from spark_elastic.protocol.types import Limits, SlotSpec, heartbeat_interval
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.addresses import Bind
from spark_elastic.rendezvous.http_server import reserve_files
from spark_elastic.rendezvous.server import RendezvousServer, ServerCallbacks
from spark_elastic.rendezvous.status_app import StatusApp
from spark_elastic.runs.checkpoint import OwnedRun

log = logging.getLogger("spark_elastic")

STOP_WITHIN = 5.0  # seconds in which a job is gone once it ends, however it ends
FIRST_ATTEMPT = 1  # of a job without a run
ERRORS = {
    JobOutcome.USER_ERROR: errors.WorkerFailed,
    JobOutcome.NOT_ENOUGH_WORKERS: errors.NotEnoughWorkers,
    JobOutcome.OUT_OF_MEMORY: errors.OutOfMemory,
    JobOutcome.FAILURE_BUDGET: errors.FailureBudgetExceeded,
    JobOutcome.RESET_LIMIT: errors.FailureBudgetExceeded,
    JobOutcome.TIME_LIMIT: errors.TimeLimitReached,
    JobOutcome.CANCELLED: JobCancelled,
}


@dataclass(frozen=True)
class LaunchResult:
    """A job that succeeded."""

    results: tuple[str, ...]  # what the workers returned, JSON text in rank order
    report: JobReport = field(default_factory=JobReport)  # where the time went

    @property
    def worlds(self) -> tuple[WorldChange, ...]:
        """All worlds, in their order."""
        return self.report.world_changes


@dataclass(frozen=True, kw_only=True)
class DriverOptions:
    """How a job's driver runs: where its server listens, which hosts it admits, and what outlives all workers."""

    bind: str = "127.0.0.1"  # the address at which the server listens
    advertise: str | None = None  # the name under which workers dial it; None: `bind`
    encrypted: bool = False  # the server speaks TLS, unless the configuration says otherwise
    check_host: Callable[[dict[str, Any]], str | None] = field(default=lambda facts: None)  # why it is unfit
    # The run to which the job's checkpoints belong and which it continues; None: no checkpoints.
    run: OwnedRun | None = None
    key: bytes | None = field(default=None, repr=False)  # the job's, if others know it; None: a new one
    scheduler: GangScheduler | None = None  # None: no other job competes for slots


def check_driver_settings(config: ElasticConfig, encrypted: bool) -> None:
    """Raise InvalidInput, before any work for the job, if `supervise` could not use a file or script of the driver's
    machine, or the handle. encrypted: see `DriverOptions`."""
    check_requests(config.host_discovery, config.handle)
    Journal(config.journal).check()
    auth.select_certificate(config, encrypted)


def supervise(
    launcher: Launcher,
    discovery: Discovery,
    options: DriverOptions,
    limits: Limits,
    config: ElasticConfig,
    name: str,
    listener: JobListener | None = None,
) -> LaunchResult:
    """Drive one job to its end over any launcher. Blocks; Ctrl-C ends the job within `STOP_WITHIN` seconds.

    Raises:
        JobFailed: with its subclasses.
        JobCancelled: the user or Spark ended the job.
    """
    clock, run = RunningClock(SystemClock()), options.run  # R12 (driver silence): own pauses do not count
    discovery = build_discovery(discovery, config.host_discovery, config.handle, clock)
    events: EventQueue = EventQueue()

    # What people see of the job.
    interval = partial(heartbeat_interval, limits.lease)
    store_log = None
    if run is not None and config.log_bytes:
        store_log = StoreLog(run.store, run.run_id, run.attempt, config.log_bytes, clock)
    stalls = StallDetector(events.put, config.stall_after, interval)
    observers = [stalls, store_log] if store_log is not None else [stalls]
    monitor = JobMonitor(listener or JobListener(), clock, observers, options.scheduler)
    journal = Journal(config.journal, monitor.on_transition)
    status = StatusApp(build_status_pages(monitor.history, name), clock) if config.status_page else None

    # The server and the driver's loop.
    key = options.key or secrets.token_bytes(32)
    certificate = auth.select_certificate(config, options.encrypted)
    bind = Bind(options.bind, config.driver_port, options.advertise, certificate)
    attempt, checkpoints = (run.attempt, run.checkpoints) if run is not None else (FIRST_ATTEMPT, ())
    callbacks = ServerCallbacks(
        events.add, monitor.on_logs, options.check_host, monitor.on_report, interval, events.wake
    )
    server = RendezvousServer(key, attempt, callbacks, clock, bind, status)

    def describe() -> Shown:
        return Shown(monitor.history.build_status(name), monitor.history.build_report())

    board = None if run is None else RunBoard(run, describe, events.put, clock)
    publish = board.publish if board is not None else lambda kept: None
    state = driver_machine.initial(limits, attempt, checkpoints)
    loop = DriverLoop(state, events, partial(execute, server, launcher, publish), clock, journal)

    # Closed in reverse order; an interrupt while one closes does not keep the others from closing.
    with ExitStack() as closing:
        closing.enter_context(reserve_files(limits.max_workers))
        closing.enter_context(isolate_log_handlers())
        # After the notifier: what the user's functions ask of a `JobHandle` until then is asked of this job.
        closing.callback(discovery.close)
        closing.enter_context(monitor.notifier)
        if board is not None:
            closing.enter_context(board)
        if store_log is not None:
            closing.callback(store_log.close)
            store_log.start()
        closing.enter_context(monitor.output)
        closing.callback(server.close)
        server.start()
        if status is not None:
            monitor.announce(f"the status page of {name}: {status.url(server.url)}")
        closing.callback(loop.close)
        closing.callback(_close_launcher, launcher)
        closing.callback(server.end, "the job is over")
        spec = SlotSpec.from_config(
            config,
            address=server.address,
            key=key,
            attempt=attempt,
            job_name=name,
            certificate=server.certificate,
            commit_key=run.load_commit_key() if run is not None and config.keep_commits else None,
        )
        most = "" if limits.max_workers == limits.num_workers else f" to {limits.max_workers}"
        workers = "worker" if limits.max_workers == 1 else "workers"
        monitor.announce(f"starting {limits.num_workers}{most} {workers} of {name}")
        launcher.start(spec, events.put)
        discovery.start(events.put)
        loop.start()
        end = _await_end(loop)
    report = monitor.history.build_report()
    if board is not None:
        board.show(end, None if status is None else save_page(monitor.history.build_status(name)))
    try:
        if end.outcome not in (JobOutcome.SUCCESS, JobOutcome.CANCELLED) and run is not None:
            with suppress(StoreError):
                run.check()  # if another driver has taken the run over, that caused the failure
        results = unpack_results(end)
    except (JobFailed, JobCancelled) as error:
        error.report = report
        raise
    if run is not None:
        run.mark_ended()
    return LaunchResult(results, report)


def make_limits(config: ElasticConfig, num_workers: int, min_workers: int, max_workers: int) -> Limits:
    """The limits of a job: the numbers of its workers, and every setting that has the name of a limit."""
    names = Limits.__dataclass_fields__.keys() & ElasticConfig.__dataclass_fields__.keys()
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    return Limits(num_workers, min_workers, max_workers, **settings)


def _close_launcher(launcher: Launcher) -> None:
    if left := launcher.close(STOP_WITHIN):
        log.warning("%.0f s after the job's end these slots still run: %s", STOP_WITHIN, ", ".join(left))


def unpack_results(end: End) -> tuple[str, ...]:
    """What the workers returned, in rank order. Raises the JobFailed that fits the outcome, or JobCancelled."""
    if end.outcome is JobOutcome.SUCCESS:
        return end.results
    reason = end.reason
    if end.outcome is JobOutcome.TIME_LIMIT:
        reason += "; to continue from the newest checkpoint, call it again with its run_id, if it has one"
    raise ERRORS.get(end.outcome, JobFailed)(f"{reason}\n{end.detail}".rstrip())


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
