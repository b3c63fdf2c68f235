"""A job whose driver runs in a Spark task, because executors cannot reach the client: the task's body and its client.

The coordinator (in the task) has the server, the driver loop and the driver machine. The client launches slots for it
and shows people how the job goes. They exchange messages through objects in the store (`state.store_channel`). If the
coordinator is lost, the job ends as `CoordinatorLost`. A heartbeat in the store makes a second copy of the task, which
Spark may start, wait for the first.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spark_elastic import errors
from spark_elastic.clock import Clock, SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import Together
from spark_elastic.driver.gathering import GatherTurn
from spark_elastic.driver.ports import Launcher
from spark_elastic.driver.remote_launcher import RemoteLauncher
from spark_elastic.errors import CoordinatorLost, InvalidInput, JobCancelled, JobFailed, NotEnoughWorkers
from spark_elastic.launch.job import DriverOptions, LaunchResult, supervise
from spark_elastic.launch.job_monitor import JobListener, WorldSpan
from spark_elastic.monitoring.log_forwarding import (
    AsyncNotifier,
    LogEntry,
    emit_forwarded,
    forward_log,
    isolate_log_handlers,
)
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.events import DriverEvent, LaunchEnded, SlotsWanted
from spark_elastic.protocol.slot_spec import SlotSpec
from spark_elastic.protocol.types import Checkpoint, Limits
from spark_elastic.state.run_lease import RunLease
from spark_elastic.state.store_channel import (
    SEND_EVERY,
    ChannelEnd,
    Message,
    StoreChannel,
    StoreHeartbeat,
    wait_until_stale,
)

log = logging.getLogger("spark_elastic")

CLIENT, COORDINATOR = "client", "coordinator"
LAST_WORDS = 10.0  # seconds for what is said at the end
LOOK_EVERY = 0.5  # seconds between two looks at the coordinator's job


@dataclass(frozen=True)
class Coordinator:
    """What is shipped to the task. run: id, attempt and checkpoints of a `RunLease`."""

    box: ChannelEnd = field(repr=False)
    limits: Limits
    config: ElasticConfig
    name: str
    encrypted: bool
    admit: Callable[[Mapping[str, Any]], str | None]
    run: tuple[str, int, tuple[Checkpoint, ...]] | None

    def run_driver(self, host: str) -> None:
        """Drive the job to its end, and tell the client of it. host: where its server listens. Blocks."""
        clock = SystemClock()
        launcher = RemoteLauncher(self.box, clock, silence_limit(self.config))
        run = None if self.run is None else RunLease(self.box.store, *self.run)
        site = DriverOptions(
            bind=host,
            encrypted=self.encrypted,
            admit=self.admit,
            run=run,
            key=self.box.key,
            gathered=lambda: launcher.channel.send({"gathered": True}),
            lacks=lambda slots: launcher.channel.send({"lacks": slots}),
        )
        told = _Told(launcher.channel)
        try:
            with StoreHeartbeat(self.box.store, self._pulse), forward_log(told.logged):
                done = supervise(launcher, Together(), site, self.limits, self.config, self.name, told)
            worlds = [dataclasses.astuple(world) for world in done.worlds]
            report = done.report.to_json()
            launcher.channel.send({"results": list(done.results), "worlds": worlds, "report": report})
        except errors.ElasticError as error:
            failed = {"failed": type(error).__name__, "text": str(error)}
            if isinstance(error, JobFailed | JobCancelled) and error.report is not None:
                failed["report"] = error.report.to_json()
            launcher.channel.send(failed)
        except Exception:  # of ours, or of the machine's: its words would stay in this executor's log
            text = f"the coordinator of {self.name}, which ran in a task, failed:\n{traceback.format_exc()}"
            launcher.channel.send({"failed": JobFailed.__name__, "text": text})
        finally:
            launcher.channel.close(LAST_WORDS)

    def wait_standby(self) -> None:
        """Return once nobody conducts. Blocks."""
        wait_until_stale(self.box.store, self._pulse, SystemClock())

    @property
    def _pulse(self) -> str:
        return f"{self.box.folder}/pulse"


@dataclass(frozen=True)
class _Told:
    """The coordinator's narrator: all of it goes to the client."""

    mail: StoreChannel

    def log(self, rank: int | None, line: str) -> None:
        self.mail.send({"log": line, "rank": rank})

    def progress(self, numbers: Mapping[str, Any]) -> None:
        self.mail.send({"progress": dict(numbers)})

    def world(self, size: int, reason: str) -> None:
        self.mail.send({"world": size, "reason": reason})

    def tell(self, text: str) -> None:
        self.mail.send({"tell": text})

    def logged(self, record: LogEntry) -> None:
        """The driver's own words would stay in this executor's standard error."""
        self.mail.send({"record": record})


def check_config(config: ElasticConfig) -> ElasticConfig:
    """The settings of a coordinator in a task.

    Raises:
        InvalidInput: one of them belongs to the client's machine.
    """
    script = isinstance(config.host_discovery, str)  # a function travels
    for name in ("handle", "journal", "tls_certificate", *["host_discovery"] * script):
        if getattr(config, name) is not None:
            raise InvalidInput(
                f"{name} does not work where executors cannot reach the client, since the coordinator runs in a task: "
                "leave it out, or run the client inside the cluster."
            )
    return dataclasses.replace(config, advertise_address=None, bind_address=None)


def silence_limit(config: ElasticConfig) -> float:
    """Seconds of silence after which either side takes the other for gone."""
    return max(config.driver_timeout, 4 * SEND_EVERY)


class CoordinatorClient:
    """Launches slots for a coordinator, and hears it out. carry: runs its task; returns why that ended."""

    def __init__(
        self,
        box: ChannelEnd,
        name: str,
        launcher: Launcher,
        turn: GatherTurn,
        narrate: JobListener,
        clock: Clock,
    ) -> None:
        self._box = box
        self._name = name
        self._launcher = launcher
        self._turn = turn
        self._narrate = narrate
        self._clock = clock
        self._mail = StoreChannel(box, self._heard, clock)
        self._teller = (
            AsyncNotifier()
        )  # so that a terminal that blocks does not look like a client that is gone
        self._begun = False
        self._waits_since = 0.0  # for a core, while no other job of the application trains
        self._end: Message | None = None
        self._gone: list[str] = []  # why
        self._ended = threading.Event()

    def follow(self, carry: Callable[[], str], attempt: int, config: ElasticConfig) -> LaunchResult:
        """See the job to its end. attempt: the run's, which workers prove in each request.

        Raises:
            CoordinatorLost: its task ended without a word. NotEnoughWorkers: no executor took that. As
            `launch.supervise`.
        """
        self._attempt, self._config = attempt, config
        with isolate_log_handlers(), self._teller:
            self._follow(carry, config)
        if self._end is None:
            why = self._gone[0] if self._gone else "it is silent"
            raise CoordinatorLost(f"the coordinator of {self._name}, which ran in a task, was lost: {why}")
        return _result(self._end)

    def _follow(self, carry: Callable[[], str], config: ElasticConfig) -> None:
        self._waits_since, patient = self._clock.now(), silence_limit(config)
        gone = self._gone
        carrier = threading.Thread(target=lambda: gone.append(carry()), name="coordinator", daemon=True)
        carrier.start()
        self._mail.start()
        self._turn.start(self._forward)
        try:
            while not self._ended.wait(LOOK_EVERY) and carrier.is_alive():
                if not self._begun and self._clock.now() - self._waits_since > config.start_timeout:
                    raise NotEnoughWorkers(
                        f"no executor took the coordinator of {self._name} within {config.start_timeout:g} s "
                        "(start_timeout): it needs a core beside those of the workers."
                    )
                if self._begun and self._clock.now() - self._mail.last_seen > patient:
                    gone.append(f"it has not been heard for {patient:g} s")
                    break
        except BaseException:
            self._mail.send({"cancel": "the caller was interrupted"})
            raise
        finally:
            self._turn.close()
            self._mail.close(LAST_WORDS)  # which also reads the last words of one that has just ended
            left = self._launcher.close(LAST_WORDS)
            if left:
                log.warning("still running at Spark: %s", ", ".join(left))

    def _forward(self, event: DriverEvent) -> None:
        match event:
            case LaunchEnded():
                self._mail.send(
                    {
                        "ended": event.launch,
                        "reason": event.reason,
                        "cancelled": event.cancelled,
                        "executor_lost": event.executor_lost,
                    }
                )
            case SlotsWanted():
                self._mail.send({"wanted": event.reason, "taken": event.in_use})
                self._waits_since = event.now

    def _heard(self, letter: Message) -> None:
        match letter:
            case {"contact": str(address), "certificate": certificate}:
                self._begun = True
                log.info("the coordinator of %s runs in a task, at %s", self._name, address)
                spec = SlotSpec.from_config(
                    self._config,
                    address=address,
                    key=self._box.key,
                    attempt=self._attempt,
                    job_name=self._name,
                    certificate=certificate,
                )
                self._launcher.start(spec, self._forward)
            case {"launch": int(job)}:
                self._launcher.launch(job)
            case {"log": str(line), "rank": rank}:
                self._teller.tell(partial(self._narrate.log, rank, line))
            case {"progress": dict(numbers)}:
                self._teller.progress(partial(self._narrate.progress, numbers))
            case {"world": int(size), "reason": str(reason)}:
                self._teller.tell(partial(self._narrate.world, size, reason))
            case {"gathered": True}:
                self._turn.gathered()
            case {"lacks": bool(slots)}:
                self._turn.lacks(slots)
            case {"tell": str(text)}:
                self._teller.tell(partial(self._narrate.tell, text))
            case {"record": [level, name, text, told]}:
                emit_forwarded(level, name, text, told)
            case {"results": _} | {"failed": _}:
                self._end = letter
                self._ended.set()


def _result(end: Message) -> LaunchResult:
    if "failed" in end:
        error = getattr(errors, end["failed"], JobFailed)(end["text"])
        if "report" in end:
            error.report = JobReport.from_json(end["report"])
        raise error
    worlds = tuple(WorldSpan(*world) for world in end["worlds"])
    return LaunchResult(tuple(end["results"]), worlds, (), JobReport.from_json(end["report"]))
