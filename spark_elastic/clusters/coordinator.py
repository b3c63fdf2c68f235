"""A job whose driver runs in a Spark task, because executors cannot reach the client: the task's body and its client.

The coordinator (in the task) has the server, the driver loop and the driver machine. The client launches slots for it
and shows people how the job goes. They exchange messages through objects in the store (`runs.store_channel`), since
Spark hands on a task's output only when the task ends. If the coordinator is lost, the job ends as `CoordinatorLost`. A
second copy of the task, which Spark may start, waits until the first one is silent.
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
from typing import Any, TypeVar

from spark_elastic import errors
from spark_elastic.clock import Clock, RunningClock, SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.gang_scheduler import GangScheduler
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.driver.ports import Launcher, Post
from spark_elastic.errors import CoordinatorLost, InvalidInput, JobFailed, NotEnoughWorkers
from spark_elastic.monitoring.listener import AsyncNotifier, JobListener
from spark_elastic.monitoring.logs import LogEntry, emit_forwarded, forward_log, isolate_log_handlers
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.events import CancelRequested, DriverEvent, LaunchEnded, SlotsWanted
from spark_elastic.protocol.types import Checkpoint, Limits, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.runs.store_channel import SILENT_AFTER, ChannelEnd, StoreChannel, wait_until_silent

log = logging.getLogger("spark_elastic")
T = TypeVar("T")

CLIENT, COORDINATOR = "client", "coordinator"
CLOSE_WAIT = 10.0  # seconds for the last messages, and for slots that still run
LOOK_EVERY = 0.5  # seconds between two looks at the other side
CLIENT_EVENTS = (LaunchEnded, SlotsWanted, CancelRequested)  # what the client sends
MOST_IDLE = 3  # this many coordinators lost in a row without a new checkpoint end the fit


@dataclass(frozen=True)
class ClientCall:
    """A method that the client is to call, if it is one of those that it lists."""

    target: str  # name of the object, which the client has
    method: str  # name
    arguments: tuple[Any, ...]  # in their order; the client checks their types


class RemoteLauncher:
    """A `Launcher` by way of a client. silence_limit: seconds without word from it that cancel the job."""

    def __init__(self, end: ChannelEnd, clock: Clock, silence_limit: float) -> None:
        self.channel = StoreChannel(end, CLIENT_EVENTS, self._on_event, clock)
        self._clock, self._silence_limit = clock, silence_limit
        self._post: Post | None = None
        self._closing = threading.Event()
        self._change = threading.Condition()  # owns _open
        self._open: set[int] = set()  # numbers of the slot launches that have not ended
        self._watch = threading.Thread(target=self._watch_client, name="spark-elastic-client", daemon=True)

    def start(self, spec: SlotSpec, post: Post) -> None:
        self._post = post
        self.channel.send(ClientCall("client", "on_started", (spec.address, spec.certificate)))
        self.channel.start()
        self._watch.start()

    def launch(self, launch: int) -> None:
        with self._change:
            self._open.add(launch)
        self.channel.send(ClientCall("launcher", "launch", (launch,)))

    def close(self, timeout: float) -> list[str]:
        """Wait for the slots, which the driver has released; the client cancels those that still run at the end."""
        self._closing.set()
        with self._change:
            self._change.wait_for(lambda: not self._open, timeout / 2)
        self._watch.join(timeout / 2)
        return []

    def _on_event(self, event: LaunchEnded | SlotsWanted | CancelRequested) -> None:
        assert self._post is not None
        if isinstance(event, LaunchEnded):
            with self._change:
                self._open.discard(event.launch)
                self._change.notify_all()
        self._post(dataclasses.replace(event, now=self._clock.now()))  # the client has a clock of its own

    def _watch_client(self) -> None:
        assert self._post is not None
        while not self._closing.wait(LOOK_EVERY):
            silent = self._clock.now() - self.channel.last_seen
            if silent > self._silence_limit:
                reason = f"the client has sent nothing for {silent:.0f} s (driver_timeout)"
                self._post(CancelRequested(self._clock.now(), reason))
                return


@dataclass(frozen=True)
class JobEnd:
    """How the job ended: with results, or with an error that the client raises."""

    report: JobReport | None = None  # None: the error has none
    results: tuple[str, ...] = ()  # what the workers returned, JSON text in rank order
    error: str = ""  # name of the class in `spark_elastic.errors`; "": none
    text: str = ""  # the error's message

    def unpack(self) -> LaunchResult:
        """The result of the launch. Raises the error."""
        if not self.error:
            return LaunchResult(self.results, self.report or JobReport())
        error = getattr(errors, self.error, JobFailed)(self.text)
        if self.report is not None:
            error.report = self.report
        raise error


# Target -> method -> types of its arguments: all that a coordinator can have called at its client.
CALLS: dict[str, dict[str, tuple[Any, ...]]] = {
    "client": {"on_started": (str, str | None), "on_end": (JobEnd,)},
    "launcher": {"launch": (int,)},
    "scheduler": {"finish_gathering": (), "report_shortage": (bool,)},
    "listener": {
        "on_output": (str, int | None, str),
        "on_progress": (dict[str, Any],),
        "on_world": (int, str),
        "on_message": (str,),
    },
    "log": {"emit": (LogEntry,)},  # which would otherwise stay in the executor's standard error
}


@dataclass(frozen=True)
class Coordinator:
    """The body of the coordinator's task, as it is shipped."""

    end: ChannelEnd = field(repr=False)  # its end of the channel to the client. Holds the job's key.
    limits: Limits  # of the job
    config: ElasticConfig  # from `check_config`: without settings that belong to the client's machine
    name: str  # the job's name
    encrypted: bool  # the server speaks TLS, unless the configuration says otherwise
    check_host: Callable[[Mapping[str, Any]], str | None]  # why a host of these facts is unfit, or None
    run: tuple[str, int, tuple[Checkpoint, ...]] | None  # id, attempt, checkpoints of an `OwnedRun`, if any

    def run_driver(self, host: str) -> None:
        """Drive the job to its end, and send the client its result. Blocks. host: at which the driver listens."""
        launcher = RemoteLauncher(self.end, RunningClock(SystemClock()), silence_limit(self.config))
        channel = launcher.channel
        options = DriverOptions(
            bind=host,
            encrypted=self.encrypted,
            check_host=self.check_host,
            run=None if self.run is None else OwnedRun(self.end.store, *self.run),
            key=self.end.key,
            scheduler=_forward(channel, "scheduler", SimpleNamespace()),
        )
        listener = _forward(channel, "listener", JobListener())
        records = _forward(channel, "log", SimpleNamespace())
        job = self.limits, self.config, self.name, listener
        end: JobEnd | None = None
        try:
            with forward_log(records.emit):
                done = supervise(launcher, CombinedDiscovery(), options, *job)
            end = JobEnd(done.report, done.results)
        except errors.ElasticError as error:
            end = JobEnd(getattr(error, "report", None), error=type(error).__name__, text=str(error))
        except Exception:  # a defect of ours or of the machine, which would stay in this executor's log
            text = f"the coordinator of {self.name}, which ran in a task, failed:\n{traceback.format_exc()}"
            end = JobEnd(error=JobFailed.__name__, text=text)
        finally:
            if end is not None:
                channel.send(ClientCall("client", "on_end", (end,)))
            channel.close(CLOSE_WAIT)

    def wait_standby(self) -> None:
        """Return once no other copy of this task drives the job. Blocks."""
        wait_until_silent(self.end, RunningClock(SystemClock()))


def _forward(channel: StoreChannel, target: str, proxy: Any) -> Any:
    """Have an object pass the calls of its listed methods to the client. proxy: has all other methods."""

    def pass_on(method: str, *arguments: Any) -> None:
        channel.send(ClientCall(target, method, arguments))

    for method in CALLS[target]:
        setattr(proxy, method, partial(pass_on, method))
    return proxy


def check_config(config: ElasticConfig) -> ElasticConfig:
    """The settings of a coordinator in a task. Raises InvalidInput: one of them belongs to the client's machine."""
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
    return max(config.driver_timeout, SILENT_AFTER)


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
        """spec: of the slots; the coordinator fills in its address and certificate."""
        self._spec, self._launcher, self._scheduler = spec, launcher, scheduler
        self._targets: dict[str, object] = {  # of `CALLS`
            "client": self,
            "launcher": launcher,
            "scheduler": scheduler,
            "listener": listener,
            "log": SimpleNamespace(emit=emit_forwarded),
        }
        self._clock = clock
        self._channel = StoreChannel(end, (ClientCall,), self._call, clock)
        # The listener is called in another thread: a terminal that blocks must not look like a client that is gone.
        self._notifier = AsyncNotifier()
        self._task_started = False  # the coordinator's task runs
        self._waits_since = 0.0  # since when it waits for a core, but not while another job trains
        self._end: JobEnd | None = None
        self._losses: list[str] = []  # why the coordinator is gone
        self._ended = threading.Event()

    def follow(self, run_task: Callable[[], str], config: ElasticConfig) -> LaunchResult:
        """Run the coordinator's task and follow the job to its end. Blocks. run_task: returns why the task ended.
        Raises CoordinatorLost: without a result. NotEnoughWorkers: no executor took it. Else as `supervise`."""
        with isolate_log_handlers(), self._notifier:
            self._follow(run_task, config)
        if self._end is None:
            why = self._losses[0] if self._losses else "it is silent"
            name = f"the coordinator of {self._spec.job_name}"
            raise CoordinatorLost(f"{name}, which ran in a task, was lost: {why}")
        return self._end.unpack()

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

    def on_started(self, address: str, certificate: str | None) -> None:
        """The driver listens: slots can be launched. certificate: of its server, PEM; None: plain HTTP."""
        self._task_started = True
        log.info("the coordinator of %s runs in a task, at %s", self._spec.job_name, address)
        spec = dataclasses.replace(self._spec, address=address, certificate=certificate)
        self._launcher.start(spec, self._forward)

    def on_end(self, end: JobEnd) -> None:
        self._end = end
        self._ended.set()

    def _call(self, call: ClientCall) -> None:
        """Raises KeyError: the method is not listed. MalformedMessage: an argument is of another type."""
        name = f"{call.target}.{call.method}"
        pairs = zip(CALLS[call.target][call.method], call.arguments, strict=True)
        arguments: Any = [codec.read_as(hint, argument, name) for hint, argument in pairs]
        method = partial(getattr(self._targets[call.target], call.method), *arguments)
        if call.target != "listener":
            method()
        elif call.method == "on_progress":
            self._notifier.submit_latest(method)
        else:
            self._notifier.submit(method)


def resume_after_coordinator_loss(attempt: Callable[[], T], find_checkpoints: Callable[[], object]) -> T:
    """`attempt()`, and again after the loss of its coordinator, which is that of a driver (P7): the client takes the
    run's next attempt. Raises CoordinatorLost: `MOST_IDLE` in a row were lost without a new checkpoint."""
    before, idle = find_checkpoints(), 0
    while True:
        try:
            return attempt()
        except CoordinatorLost as error:
            after = find_checkpoints()
            before, idle = after, 0 if after != before else idle + 1
            if idle >= MOST_IDLE:
                raise
            log.warning("%s; the run continues from its newest checkpoint", error)
