"""One probe of a host: does it load the program, see the store, reach the driver and the other hosts, can it encrypt?

A probe runs as a short Spark task. What it finds it returns as sentences, and `preflight` judges them.
"""

from __future__ import annotations

import os
import pickle
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle

import spark_elastic
from spark_elastic.clock import Clock, SystemClock
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, PreflightError, StoreError
from spark_elastic.rendezvous.http_server import Bind, dialled, listen
from spark_elastic.spark.payload import Payload
from spark_elastic.spark.session import collect_host_facts, find_own_address

# Do executors reach one another? Probes of one job exchange addresses through the store and dial each other.
#
# Blocks in the task's thread for a few seconds at most. Probes that do not run side by side have nothing to say.


MEET_SECONDS = 5.0  # for those who have not come, and those who have not finished
DIAL_SECONDS = 3.0
LOOK_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class PeerCheck:
    """A folder of the store, and this probe's address."""

    store: Store
    folder: str
    address: str

    def run(self, expected: int, clock: Clock) -> str | None:
        """The address of another that cannot be dialled; None where there is none. expected: probes in all."""
        # The kernel takes connections by itself.
        door = listen(Bind(self.address))
        own = f"{self.folder}/{uuid.uuid4().hex}"
        try:
            self.store.write_bytes(own, dialled(Bind(self.address), door).encode())
            there = self._wait_for_names("", expected, clock) - {own}
            refused = next((name for name in sorted(there) if not self._is_reachable(name)), None)
            self.store.write_bytes(f"{own}.done", b"")
            self._wait_for_names(".done", len(there) + 1, clock)
            return None if refused is None else self._address(refused)
        finally:
            self.store.delete(own)
            door.close()

    def _wait_for_names(self, ending: str, expected: int, clock: Clock) -> set[str]:
        """What has that ending, once it is so many, or the time is over."""
        deadline = clock.now() + MEET_SECONDS
        while True:
            names = {name for name in self.store.list(self.folder) if name.endswith(".done") is bool(ending)}
            if len(names) >= expected or clock.now() > deadline:
                return names
            clock.sleep(LOOK_EVERY)

    def _is_reachable(self, name: str) -> bool:
        """Whether it answers, or is gone by now."""
        address = self._address(name)
        if address is None:
            return True
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), DIAL_SECONDS).close()
        except OSError:
            return self._address(name) is None
        return True

    def _address(self, name: str) -> str | None:
        try:
            return self.store.read_bytes(name).decode()
        except StoreError:
            return None


Task: TypeAlias = Callable[[Iterable[int]], Iterator[Any]]

HOLD_SECONDS = 0.2  # a probe keeps its core so long, so that the next one goes to another executor
REACH_SECONDS = 5.0  # for a connection to the driver
PROBES = "probes"


@dataclass(frozen=True)
class ProbeSpec:
    """What is looked at.

    payload: cloudpickle of what workers will load; what: it in words. needs: frameworks that the job uses. bind: where
    the job's server will listen; None: whether hosts reach it is not looked at. encrypted: workers talk inside TLS.
    """

    payload: bytes
    store: Store | None = None
    needs: tuple[str, ...] = ()
    bind: Bind | None = None
    what: str = "the program"
    encrypted: bool = False


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found. process: tells executors apart. fault: one sentence, or None. unreached: the same, of the way
    to the driver."""

    facts: dict[str, str]
    process: int
    written: str
    fault: str | None
    unreached: str | None = None

    @property
    def executor(self) -> tuple[str, int]:
        return self.facts["host"], self.process


@dataclass(frozen=True)
class Probe:
    """The body of a spec task. It returns what went wrong; raising would only make Spark try again.

    what, encrypted: as of `ProbeSpec`. driver: the address that workers will dial. together: so many probes see, at
    `towards`, whether they reach one another; 0: not looked at.
    """

    store: Store | None
    token: str
    what: str = ProbeSpec.what
    driver: str | None = None
    encrypted: bool = False
    together: int = 0
    towards: str | None = None

    def report(self, number: int, program: bytes) -> ProbeReport:
        found = collect_host_facts()
        name = f"{PROBES}/{self.token}/{found['host']}-{os.getpid()}-{number}"
        host = found["host"]
        fault = (
            self._check_program(host, program)
            or self._check_store(host, name)
            or self._check_encryption(host)
            or self._check_peers(host)
        )
        unreached = self._check_driver(host)
        SystemClock().sleep(HOLD_SECONDS)
        # The parent is the executor's Python daemon: one per executor.
        return ProbeReport(found, os.getppid(), name, fault, unreached)

    def _check_peers(self, host: str) -> str | None:
        if self.store is None or self.together < 2:
            return None
        meeting = PeerCheck(self.store, f"{PROBES}/{self.token}/meeting", find_own_address(self.towards))
        refused = meeting.run(self.together, SystemClock())
        return refused and (
            f"host {host} cannot reach {refused}, another executor: workers exchange gradients directly, which "
            "serverless compute does not allow; use a cluster whose executors reach one another, or num_workers=1."
        )

    def _check_encryption(self, host: str) -> str | None:
        if not self.encrypted:
            return None
        from spark_elastic.worker.entry import find_tls_problem

        refused = find_tls_problem()
        return refused and f"host {host}: {refused}, or set tls=False."

    def _check_program(self, host: str, program: bytes) -> str | None:
        try:
            cloudpickle.loads(program)
        except Exception as error:  # whatever user classes raise while they are unpickled
            return (
                f"host {host} cannot load {self.what} ({_kind(error)}): ship their modules with "
                "--py-files or install them there."
            )
        return None

    def _check_driver(self, host: str) -> str | None:
        if self.driver is None:
            return None
        name, _, port = self.driver.rpartition(":")
        try:
            socket.create_connection((name.strip("[]"), int(port)), REACH_SECONDS).close()
        except OSError as error:
            return (
                f"host {host} cannot reach the driver at {self.driver} ({error}): let executors reach it there, or set "
                "advertise_address and driver_port to what they reach."
            )
        return None

    def _check_store(self, host: str, name: str) -> str | None:
        if self.store is None:
            return None
        try:
            seen = self.store.read_bytes(f"{PROBES}/{self.token}/driver") == self.token.encode()
        except (ElasticError, OSError):
            seen = False
        if not seen:
            return (
                f"host {host} does not see what the driver wrote to the store {self.store.url}: "
                "choose a place that all machines share, such as s3://, hdfs:// or a network drive."
            )
        try:
            self.store.write_bytes(name, self.token.encode())
            if self.store.read_bytes(name) != self.token.encode():
                return f"host {host} reads something else than it wrote in the store {self.store.url}."
        except (ElasticError, OSError) as error:
            return f"host {host} cannot write to the store {self.store.url} ({_kind(error)}): give it the right to."
        return None


def make_probe_task(probe: Probe, program: Payload) -> Task:
    """The probe as a nested function, which travels by value, so that it starts even where our package is missing."""
    packed = pickle.dumps(probe)

    def run(numbers: Iterable[int]) -> Iterator[Any]:
        for number in list(numbers):  # consumed, so that Spark uses the Python worker again
            try:
                yield pickle.loads(packed).report(number, program.value)
            except ImportError as error:
                yield socket.gethostname(), str(error)

    return run


@contextmanager
def open_probe(spec: ProbeSpec) -> Iterator[Probe]:
    """A probe whose store and driver are there to be found as long as the block runs.

    Raises:
        StoreError: the driver cannot write the store. InvalidInput: `bind` cannot be bound.
    """
    token, store, bind = uuid.uuid4().hex, spec.store, spec.bind
    if store is not None:
        store.write_bytes(f"{PROBES}/{token}/driver", token.encode())
    # Nobody need answer at this door: the kernel takes connections by itself.
    door = listen(bind) if bind is not None else None
    try:
        driver = dialled(bind, door) if bind is not None and door is not None else None
        yield Probe(store, token, spec.what, driver, spec.encrypted)
    finally:
        if door is not None:
            door.close()
        if store is not None:
            store.remove_tree(f"{PROBES}/{token}")


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# What the answers of probes mean for a job: the first reason against it, as an error.


def require_report(answer: Any) -> ProbeReport:
    """Raises PreflightError where a probe found no spark_elastic to load."""
    if isinstance(answer, ProbeReport):
        return answer
    host, reason = answer
    version = spark_elastic.__version__
    raise PreflightError(
        f"host {host} cannot load spark_elastic ({reason}), and the driver has {version}: install "
        f"spark_elastic {version} there, or send it along with ship=True."
    )


def check_reports(
    reports: list[ProbeReport],
    judge: Callable[[Mapping[str, Any]], str | None],
    store: Store | None,
    reached: bool = True,
) -> None:
    """Raises PreflightError with what the first host lacks, or where the driver does not see what a host wrote.

    reached: hosts must reach the driver.
    """
    # Versions first: they explain why a program does not load.
    faults = [*(judge(report.facts) for report in reports), *(report.fault for report in reports)]
    for fault in [*faults, *(report.unreached for report in reports if reached)]:
        if fault is not None:
            raise PreflightError(fault)
    for report in reports if store is not None else []:
        assert store is not None
        try:
            store.read_bytes(report.written)
        except (ElasticError, OSError) as error:
            raise PreflightError(
                f"the driver does not see what host {report.facts['host']} wrote to the store {store.url}: "
                "choose a place that all machines share, such as s3://, hdfs:// or a network drive."
            ) from error


# Which hosts may take part in a job, from their versions alone. Pure.
#
# What must match: spark_elastic exactly (hosts speak its wire format), Python to the minor (cloudpickle carries
# bytecode), numpy and the frameworks to the major (where pickles and kernels change; a driver and its executors may
# well have different builds of one release line).


# Package -> how many leading parts of its version must be equal; None: all of it.
MUST_MATCH: dict[str, int | None] = {
    "spark_elastic": None,
    "python": 2,
    "numpy": 1,
    "torch": 1,
    "tensorflow": 1,
    "keras": 1,
}
ALWAYS_NEEDED = ("spark_elastic", "python", "numpy")


def make_version_check(
    driver: Mapping[str, Any], needs: tuple[str, ...] = ()
) -> Callable[[Mapping[str, Any]], str | None]:
    """A judge of hosts: given a host's facts, why it cannot take part in a job of this driver, or None.

    needs: frameworks that the job uses. One that it does not use may be missing or of any version.
    """
    packages = [p for p in MUST_MATCH if p in ALWAYS_NEEDED or p in needs]

    def judge(host: Mapping[str, Any]) -> str | None:
        for package in packages:
            here, there = driver.get(package), host.get(package)
            if here is None or (there is not None and _agree(str(here), str(there), MUST_MATCH[package])):
                continue
            name = host.get("host", "unknown")
            if there is None:
                return f"host {name} has no {package}, and the driver has {here}: install {package} {here} there."
            return (
                f"host {name} has {package} {there}, and the driver has {here}: "
                f"install {package} {here} on one of them to match."
            )
        return None

    return judge


def _agree(here: str, there: str, parts: int | None) -> bool:
    if parts is None:
        return here == there
    return here.split(".")[:parts] == there.split(".")[:parts]
