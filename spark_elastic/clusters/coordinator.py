"""A job whose driver runs in a Spark task, because executors cannot reach the client: the task's body and its client.

The coordinator (in the task) has the server, the driver loop and the driver machine. The client launches slots for it
and shows people how the job goes. They exchange messages through objects in the store (`state.store_channel`), since
Spark hands on a task's output only when the task ends. If the coordinator is lost, the job ends as `CoordinatorLost`. A
heartbeat in the store makes a second copy of the task, which Spark may start, wait for the first.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, get_args

from spark_elastic import errors
from spark_elastic.clock import Clock, SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.gang_scheduler import GangScheduler
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.driver.ports import Launcher
from spark_elastic.driver.remote_launcher import ClientCall, DriverStarted, RemoteLauncher
from spark_elastic.errors import CoordinatorLost, InvalidInput, JobCancelled, JobFailed, NotEnoughWorkers
from spark_elastic.monitoring.listener import AsyncNotifier, JobListener
from spark_elastic.monitoring.log_forwarding import (
    LogEntry,
    emit_forwarded,
    forward_log,
    isolate_log_handlers,
)
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.events import CancelRequested, DriverEvent, LaunchEnded, SlotsWanted
from spark_elastic.protocol.types import Checkpoint, Limits, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.runs.store_channel import (
    SEND_EVERY,
    ChannelEnd,
    StoreChannel,
    StoreHeartbeat,
    wait_until_stale,
)

log = logging.getLogger("spark_elastic")

CLIENT, COORDINATOR = "client", "coordinator"
CLOSE_WAIT = 10.0  # seconds for the last messages, and for slots that still run
LOOK_EVERY = 0.5  # seconds between two looks at the coordinator's job


# ---- what the coordinator sends to its client

# Target -> method -> types of its arguments: all that a coordinator can have called at its client.
CALLS: dict[str, dict[str, tuple[Any, ...]]] = {
    "launcher": {"launch": (int,)},
    "scheduler": {"finish_gathering": (), "report_shortage": (bool,)},
    "listener": {
        "on_output": (str, int | None, str),
        "on_progress": (dict[str, Any],),
        "on_world": (int, str),
        "on_message": (str,),
    },
    # A record of the coordinator's log, which would otherwise stay in the executor's standard error.
    "log": {"emit": (LogEntry,)},
}


@dataclass(frozen=True)
class JobSucceeded:
    results: tuple[str, ...]  # what the workers returned, JSON text in rank order
    report: str  # JSON text of a `JobReport`


@dataclass(frozen=True)
class JobEndedInError:
    error: str  # name of the class in `spark_elastic.errors`
    text: str  # the error's message; the client raises the error with it
    report: str | None = None  # JSON text of a `JobReport`, if the error has one


JobEnd: TypeAlias = JobSucceeded | JobEndedInError
Message: TypeAlias = DriverStarted | ClientCall | JobEnd
COORDINATOR_MESSAGES: tuple[type, ...] = get_args(Message)


# ---- the task


@dataclass(frozen=True)
class Coordinator:
    """The body of the coordinator's task, as it is shipped."""

    end: ChannelEnd = field(repr=False)  # its end of the channel to the client. Holds the job's key.
    limits: Limits  # of the job
    config: ElasticConfig  # from `check_config`: without settings that belong to the client's machine
    name: str  # the job's name
    encrypted: bool  # the server speaks TLS, unless the configuration says otherwise
    # Why a host with these facts cannot take part, or None.
    check_host: Callable[[Mapping[str, Any]], str | None]
    # Id, attempt and checkpoints of a `OwnedRun`; None: the job writes no checkpoints.
    run: tuple[str, int, tuple[Checkpoint, ...]] | None

    def run_driver(self, host: str) -> None:
        """Drive the job to its end, and send the client its result. Blocks.

        Args:
            host: the address at which the driver's server listens.
        """
        launcher = RemoteLauncher(self.end, SystemClock(), silence_limit(self.config))
        channel = launcher.channel
        options = DriverOptions(
            bind=host,
            encrypted=self.encrypted,
            check_host=self.check_host,
            run=None if self.run is None else OwnedRun(self.end.store, *self.run),
            key=self.end.key,
            scheduler=_forward(channel, "scheduler", SimpleNamespace()),
        )
        listener, records = (
            _forward(channel, "listener", JobListener()),
            _forward(channel, "log", SimpleNamespace()),
        )
        try:
            with StoreHeartbeat(self.end.store, self._heartbeat), forward_log(records.emit):
                done = supervise(
                    launcher, CombinedDiscovery(), options, self.limits, self.config, self.name, listener
                )
            channel.send(JobSucceeded(done.results, done.report.to_json()))
        except errors.ElasticError as error:
            has_report = isinstance(error, JobFailed | JobCancelled) and error.report is not None
            report = error.report.to_json() if has_report else None  # type: ignore[attr-defined]
            channel.send(JobEndedInError(type(error).__name__, str(error), report))
        except Exception:  # a defect of ours or of the machine, which would stay in this executor's log
            text = f"the coordinator of {self.name}, which ran in a task, failed:\n{traceback.format_exc()}"
            channel.send(JobEndedInError(JobFailed.__name__, text))
        finally:
            channel.close(CLOSE_WAIT)

    def wait_standby(self) -> None:
        """Return once no other copy of this task drives the job. Blocks."""
        wait_until_stale(self.end.store, self._heartbeat, SystemClock())

    @property
    def _heartbeat(self) -> str:
        return f"{self.end.folder}/heartbeat"


def _forward(channel: StoreChannel, target: str, proxy: Any) -> Any:
    """Have an object pass the calls of its listed methods to the client.

    Args:
        proxy: has all other methods.
    """

    def pass_on(method: str, *arguments: Any) -> None:
        channel.send(ClientCall(target, method, arguments))

    for method in CALLS[target]:
        setattr(proxy, method, partial(pass_on, method))
    return proxy


# ---- the client


def check_config(config: ElasticConfig) -> ElasticConfig:
    """The settings of a coordinator in a task.

    Raises:
        InvalidInput: one of them belongs to the client's machine.
    """
    script = isinstance(config.host_discovery, str)  # a function can be shipped, a script cannot
    for name in ("handle", "journal", "tls_certificate", *["host_discovery"] * script):
        if getattr(config, name) is not None:
            raise InvalidInput(
                f"{name} does not work where executors cannot reach the client, since the coordinator runs in a task: "
                "leave it out, or run the client inside the cluster."
            )
    return dataclasses.replace(config, advertise_address=None, bind_address=None)


def silence_limit(config: ElasticConfig) -> float:
    """Seconds of silence after which either side assumes that the other is gone."""
    return max(config.driver_timeout, 4 * SEND_EVERY)


class CoordinatorClient:
    """Launches slots for a coordinator, shows people its messages, and returns its result."""

    def __init__(
        self,
        end: ChannelEnd,
        spec: SlotSpec,
        launcher: Launcher,
        scheduler: GangScheduler,
        listener: JobListener,
        clock: Clock,
    ) -> None:
        """
        Args:
            spec: of the slots; the coordinator fills in its address and certificate.
        """
        self._spec = spec
        self._launcher = launcher
        self._scheduler = scheduler
        log_target = SimpleNamespace(emit=emit_forwarded)
        # The objects of `CALLS`.
        self._targets = {
            "launcher": launcher,
            "scheduler": scheduler,
            "listener": listener,
            "log": log_target,
        }
        self._clock = clock
        self._channel = StoreChannel(end, COORDINATOR_MESSAGES, self._on_message, clock)
        # The listener is called in another thread: a terminal that blocks must not look like a client that is gone.
        self._notifier = AsyncNotifier()
        self._task_started = False  # the coordinator's task runs
        # Since when it waits for a core; time in which another job of the application trains does not count.
        self._waits_since = 0.0
        self._end: JobEnd | None = None
        self._losses: list[str] = []  # why the coordinator is gone
        self._ended = threading.Event()

    def follow(self, run_task: Callable[[], str], config: ElasticConfig) -> LaunchResult:
        """Run the coordinator's task and follow the job to its end. Blocks.

        Args:
            run_task: runs the task; returns why it ended.

        Raises:
            CoordinatorLost: the task ended without a result.
            NotEnoughWorkers: no executor took the task.
            JobFailed, JobCancelled: as `launch.job.supervise`.
        """
        with isolate_log_handlers(), self._notifier:
            self._follow(run_task, config)
        if self._end is None:
            why = self._losses[0] if self._losses else "it is silent"
            raise CoordinatorLost(
                f"the coordinator of {self._spec.job_name}, which ran in a task, was lost: {why}"
            )
        return _unpack_end(self._end)

    def _follow(self, run_task: Callable[[], str], config: ElasticConfig) -> None:
        self._waits_since, limit = self._clock.now(), silence_limit(config)
        losses = self._losses
        task = threading.Thread(target=lambda: losses.append(run_task()), name="coordinator", daemon=True)
        task.start()
        self._channel.start()
        self._scheduler.start(self._forward)
        try:
            while not self._ended.wait(LOOK_EVERY) and task.is_alive():
                if not self._task_started and self._clock.now() - self._waits_since > config.start_timeout:
                    raise NotEnoughWorkers(
                        f"no executor took the coordinator of {self._spec.job_name} within {config.start_timeout:g} s "
                        "(start_timeout): it needs a core beside those of the workers."
                    )
                if self._task_started and self._clock.now() - self._channel.last_seen > limit:
                    losses.append(f"it has sent nothing for {limit:g} s")
                    break
        except BaseException:
            self._channel.send(CancelRequested(self._clock.now(), "the caller was interrupted"))
            raise
        finally:
            self._scheduler.close()
            self._channel.close(CLOSE_WAIT)  # also reads the last messages of a task that has just ended
            left = self._launcher.close(CLOSE_WAIT)
            if left:
                log.warning("still running at Spark: %s", ", ".join(left))

    def _forward(self, event: DriverEvent) -> None:
        """Send an event of the launcher or of the scheduler to the coordinator."""
        if isinstance(event, SlotsWanted):
            self._waits_since = event.now
        if isinstance(event, LaunchEnded | SlotsWanted):
            self._channel.send(event)

    def _on_message(self, message: Message) -> None:
        match message:
            case DriverStarted(address, certificate):
                self._task_started = True
                log.info("the coordinator of %s runs in a task, at %s", self._spec.job_name, address)
                spec = dataclasses.replace(self._spec, address=address, certificate=certificate)
                self._launcher.start(spec, self._forward)
            case ClientCall():
                self._call(message)
            case JobSucceeded() | JobEndedInError():
                self._end = message
                self._ended.set()

    def _call(self, call: ClientCall) -> None:
        """
        Raises:
            KeyError: the method is not listed. MalformedMessage: an argument is of another type.
        """
        types, name = CALLS[call.target][call.method], f"{call.target}.{call.method}"
        arguments: Any = [
            codec.read_as(hint, argument, name) for hint, argument in zip(types, call.arguments, strict=True)
        ]
        method = partial(getattr(self._targets[call.target], call.method), *arguments)
        if call.target != "listener":
            method()
        elif call.method == "on_progress":
            self._notifier.submit_latest(method)
        else:
            self._notifier.submit(method)


def _unpack_end(end: JobEnd) -> LaunchResult:
    if isinstance(end, JobEndedInError):
        error = getattr(errors, end.error, JobFailed)(end.text)
        if end.report is not None:
            error.report = JobReport.from_json(end.report)
        raise error
    return LaunchResult(end.results, JobReport.from_json(end.report))
