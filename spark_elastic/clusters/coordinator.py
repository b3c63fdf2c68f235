"""A job whose driver runs in a Spark task, because executors cannot reach the client: the task's body and its client.

The coordinator (in the task) has the server, the driver loop and the driver machine. The client launches slots for it
and shows people how the job goes. They exchange messages through objects in the store (`StoreChannel`), since Spark
hands on a task's output only when the task ends. If the coordinator is lost, the job ends as `CoordinatorLost`. A
second copy of the task, which Spark may start, waits until the first one is silent.
"""

from __future__ import annotations

import base64
import dataclasses
import hmac
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from spark_elastic import errors
from spark_elastic.clock import Clock, RunningClock, SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.gang_scheduler import GangScheduler
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.driver.ports import Launcher, Post
from spark_elastic.errors import CoordinatorLost, InvalidInput, JobFailed, NotEnoughWorkers, StoreError
from spark_elastic.monitoring.listener import AsyncNotifier, JobListener
from spark_elastic.monitoring.logs import LogEntry, emit_forwarded, forward_log, isolate_log_handlers
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.events import CancelRequested, DriverEvent, LaunchEnded, SlotsWanted
from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.runs.checkpoint import OwnedRun

log = logging.getLogger("spark_elastic")
T = TypeVar("T")

CLIENT, COORDINATOR = "client", "coordinator"
CLOSE_WAIT = 10.0  # seconds for the last messages, and for slots that still run
LOOK_EVERY = 0.5  # seconds between two looks at the other side
POLL_EVERY = 0.5  # seconds between two looks into the store
SEND_EVERY = 2.0  # seconds after which a side without messages sends an empty list, as a sign of life
SILENT_AFTER = 4 * SEND_EVERY  # seconds after which a side that has sent nothing counts as gone
CLIENT_EVENTS = (LaunchEnded, SlotsWanted, CancelRequested)  # what the client sends
MOST_IDLE = 3  # this many coordinators lost in a row without a new checkpoint end the fit


# ---- the channel: objects of the store, each a JSON list of the messages since the one before, signed with the job's
# key. The side that reads them deletes all but the newest, by which `wait_until_silent` sees that the other side lives.


@dataclass(frozen=True)
class ChannelEnd:
    """One side's end of a channel."""

    store: Store  # that both sides reach
    folder: str  # of this channel alone, in the store
    key: bytes = field(repr=False)  # the job's, with which messages are signed
    own: str  # name of this side
    other: str  # name of the other side

    def object_name(self, to: str, number: int) -> str:
        return f"{self.folder}/{to}-{number:08d}"

    def sign(self, name: str, messages: list[dict[str, Any]]) -> bytes:
        """The content of the object of that name: a signature and, on the next line, the messages."""
        body = json.dumps(messages).encode()
        return self._signature(name, body) + b"\n" + body

    def verify(self, name: str, content: bytes) -> list[dict[str, Any]]:
        """The messages in the object of that name; StoreError: the other side did not write it so, or not yet all."""
        signature, _, body = content.partition(b"\n")
        if not hmac.compare_digest(signature, self._signature(name, body)):
            raise StoreError(f"The message {name} is not whole, or not signed with the job's key.")
        messages: list[dict[str, Any]] = json.loads(body)
        return messages

    def _signature(self, name: str, body: bytes) -> bytes:
        return base64.b64encode(hmac.digest(self.key, b"message\0" + name.encode() + b"\0" + body, "sha256"))


class StoreChannel:
    """One side of a channel, with a thread of its own from `start` to `close`. Messages are dataclasses; any thread may
    send them."""

    def __init__(
        self, end: ChannelEnd, receives: Iterable[type], on_message: Callable[[Any], None], clock: Clock
    ) -> None:
        """receives: types of messages. on_message: called with each in the channel's thread, which logs what it
        raises."""
        self._end, self._on_message, self._clock = end, on_message, clock
        self._types = {cls.__name__: cls for cls in receives}
        self._lock = threading.Lock()  # owns _outbox
        self._outbox: list[object] = []
        self._unconfirmed: bytes | None = None  # an object whose write failed; it may be there all the same
        self._sent = self._read = 0  # numbers of the next objects
        self._last_sent = clock.now()
        self.last_seen = clock.now()  # when the other side last sent something
        self._closing = threading.Event()
        self._give_up_at = 0.0  # the deadline of `close`
        self._thread = threading.Thread(target=self._run, name="spark-elastic-channel", daemon=True)

    def start(self) -> None:
        self.last_seen = self._clock.now()
        self._thread.start()

    def send(self, message: object) -> None:
        with self._lock:
            self._outbox.append(message)

    def close(self, timeout: float) -> None:
        """Send what waits and read what is there, even if the channel was never started. While the store fails, try
        again until `timeout` seconds have passed: the last message may be the job's result."""
        self._give_up_at = self._clock.now() + timeout
        self._closing.set()
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(timeout)

    def poll(self) -> None:
        """Send what waits and read what is there, once. After a StoreError (an object may not be whole) nothing is
        lost."""
        self._send_outbox()
        while self._end.store.exists(name := self._end.object_name(self._end.own, self._read)):
            # An object that does not verify stays: it may be incomplete, or lie where one is still to come.
            messages = self._end.verify(name, self._end.store.read_bytes(name))
            self._read += 1
            self.last_seen = self._clock.now()
            for message in messages:
                try:
                    self._on_message(codec.read(self._types[message.pop("type")], message))
                except Exception:
                    log.exception("a message could not be handled")
            if self._read > 1:
                self._end.store.delete(self._end.object_name(self._end.own, self._read - 2))

    def _send_outbox(self) -> None:
        if self._unconfirmed is not None:
            # The other side may have read it: send the same content again, and newer messages in the next object.
            self._write(self._unconfirmed)
        with self._lock:
            messages, self._outbox = self._outbox, []
        if messages or self._clock.now() - self._last_sent >= SEND_EVERY:
            plain = [{"type": type(each).__name__, **codec.to_plain(each)} for each in messages]
            self._write(self._end.sign(self._end.object_name(self._end.other, self._sent), plain))

    def _write(self, content: bytes) -> None:
        self._unconfirmed = content
        self._end.store.write_bytes(self._end.object_name(self._end.other, self._sent), content)
        self._unconfirmed = None
        self._sent += 1
        self._last_sent = self._clock.now()

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(POLL_EVERY)
            try:
                self.poll()
                if closing:
                    return
            except StoreError as error:  # the next poll may succeed
                log.warning("messages wait: %s", error)
                if closing and self._clock.now() + POLL_EVERY > self._give_up_at:
                    return
                if closing:
                    self._clock.sleep(POLL_EVERY)


def wait_until_silent(end: ChannelEnd, clock: Clock) -> None:
    """Return once the side that has this end, too, has sent nothing for `SILENT_AFTER` seconds. While the store fails,
    nothing follows about that side, and the wait begins anew."""
    seen, since = "", clock.now()
    while clock.now() - since < SILENT_AFTER:
        clock.sleep(POLL_EVERY)
        try:
            sent = [name for name in end.store.list(end.folder) if f"/{end.other}-" in name]
        except StoreError as error:
            log.debug("the channel cannot be read: %s", error)
            since = clock.now()
        else:
            newest = max(sent, default="")
            seen, since = newest, since if newest == seen else clock.now()


# ---- the coordinator


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
        self._post: Post  # from `start` on
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
        if isinstance(event, LaunchEnded):
            with self._change:
                self._open.discard(event.launch)
                self._change.notify_all()
        self._post(dataclasses.replace(event, now=self._clock.now()))  # the client has a clock of its own

    def _watch_client(self) -> None:
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
    run: OwnedRun | None = field(repr=False)  # to which the job's checkpoints belong; None: no checkpoints

    def run_driver(self, host: str) -> None:
        """Drive the job to its end, and send the client its result. Blocks. host: at which the driver listens."""
        launcher = RemoteLauncher(self.end, RunningClock(SystemClock()), silence_limit(self.config))
        channel = launcher.channel
        options = DriverOptions(
            bind=host,
            encrypted=self.encrypted,
            check_host=self.check_host,
            run=self.run,
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
