"""A probe of a host: can it load the program, use the store, encrypt, and reach the driver and the other hosts?

A probe runs as a short Spark task and returns a `ProbeReport`; `check_reports` turns the first fault into an error.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import spark_elastic
from spark_elastic.clock import Clock, SystemClock
from spark_elastic.clusters.spark.host_facts import collect_host_facts, find_own_address
from spark_elastic.clusters.spark.payload import Payload
from spark_elastic.config import find_interface_address
from spark_elastic.data.store import Store
from spark_elastic.driver.gang_scheduler import JobQueue, QueueTimeout
from spark_elastic.errors import ElasticError, InvalidInput, PreflightError, StoreError
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous.http_server import Bind, format_address, listen
from spark_elastic.worker.devices import check_host_device
from spark_elastic.worker.load_check import LOAD_SECONDS, find_load_error, find_load_error_in_fork

Task: TypeAlias = Callable[[Iterable[int]], Iterator[Any]]

PROBES = "probes"  # folder of the store
HOLD_SECONDS = 0.2  # for which a probe keeps its core, so that the next one goes to another executor
REACH_SECONDS = 5.0  # for a connection to the driver
PEERS_SECONDS = 5.0  # for probes that have not come, and for those that have not finished
DIAL_SECONDS = 3.0  # for a connection to another probe
CANCEL_SECONDS = 5.0  # for the end of a job that was cancelled
LOOK_EVERY = 0.1  # seconds between two looks into the store
SHARE = "choose a place that all machines share, such as s3://, hdfs:// or a network drive."


@dataclass(frozen=True)
class ProbeSpec:
    """What the probes of a job check."""

    payload: bytes  # cloudpickle of what workers will load
    store: Store | None = None  # the store that driver and hosts must share; None: the job uses none
    needs: tuple[str, ...] = ()  # frameworks that the job uses
    # Where the job's server will listen; None: whether hosts reach it is not checked.
    bind: Bind | None = None
    what: str = "the program"  # the payload in words, for errors
    encrypted: bool = False  # workers talk inside TLS
    device: str = "auto"  # the setting of the job
    assigned: bool = False  # whether Spark gives GPUs to the job's slots
    # How the job's slots start workers, without the driver's address and the job's key; None: not known.
    slot: SlotSpec | None = None

    def make_host_check(self) -> Callable[[Mapping[str, Any]], str | None]:
        """A check of hosts: given a host's facts, why it cannot take part in the job, or None."""
        versions = make_version_check(collect_host_facts(), self.needs)
        device, needs, assigned = self.device, self.needs, self.assigned
        return lambda host: versions(host) or check_host_device(host, device, needs, assigned)


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found."""

    facts: dict[str, str]  # host name and versions: `session.collect_host_facts`
    process: int  # id of the executor's process, to count executors of one host
    written: str  # name of the object that the probe wrote to the store
    fault: str | None  # why the host cannot run the job, in one sentence, or None
    unreached: str | None = None  # why the host cannot reach the driver, in one sentence, or None

    @property
    def executor(self) -> tuple[str, int]:
        return self.facts["host"], self.process


@dataclass(frozen=True)
class PeerCheck:
    """Whether executors reach one another: probes of one job exchange addresses through the store and dial each other.
    So compute that isolates its executors is refused before any slot is asked for.

    Probes that do not run at the same time find no fault.
    """

    store: Store  # all probes reach it
    folder: str  # the folder of the check
    address: str  # of this probe

    def run(self, expected: int, clock: Clock) -> str | None:
        """Blocks for a few seconds at most. Returns the address of a probe that cannot be dialled, or None.

        Args:
            expected: number of probes, this one included.
        """
        listener = listen(Bind(self.address))  # the kernel accepts connections by itself
        own = f"{self.folder}/{uuid.uuid4().hex}"
        try:
            self.store.write_bytes(own, format_address(Bind(self.address), listener).encode())
            others = self._wait_for_names("", expected, clock) - {own}
            refused = next((name for name in sorted(others) if not self._is_reachable(name)), None)
            self.store.write_bytes(f"{own}.done", b"")
            self._wait_for_names(".done", len(others) + 1, clock)
            return None if refused is None else self._address(refused)
        finally:
            listener.close()
            with suppress(StoreError):  # it is removed with the folder of all probes
                self.store.delete(own)

    def _wait_for_names(self, ending: str, expected: int, clock: Clock) -> set[str]:
        """The names with that ending, as soon as there are `expected`, or those that are there after a while."""
        deadline = clock.now() + PEERS_SECONDS
        while True:
            names = {name for name in self.store.list(self.folder) if name.endswith(".done") is bool(ending)}
            if len(names) >= expected or clock.now() > deadline:
                return names
            clock.sleep(LOOK_EVERY)

    def _is_reachable(self, name: str) -> bool:
        """Whether that probe answers; also True if it has ended by now."""
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


@dataclass(frozen=True)
class Probe:
    """The body of a probe's task. It returns what went wrong: if it raised, Spark would try again."""

    store: Store | None  # as in `ProbeSpec`; None: it is not checked, and peers neither
    token: str  # names this preflight's objects in the store
    what: str = ProbeSpec.what  # as in `ProbeSpec`
    driver: str | None = None  # the address that workers will dial; None: not checked
    encrypted: bool = False  # as in `ProbeSpec`; the host must be able to use TLS then
    peers: int = 0  # number of probes that check whether they reach one another; 0: not checked
    # A host that all executors reach: their own addresses are those on the way to it.
    reachable_host: str | None = None
    slot: SlotSpec | None = None  # as in `ProbeSpec`
    hold: float = HOLD_SECONDS  # seconds for which a probe keeps its core at least

    def report(self, number: int, program: bytes) -> ProbeReport:
        clock = SystemClock()
        began, facts = clock.now(), collect_host_facts()
        host = facts["host"]
        name = f"{PROBES}/{self.token}/{host}-{os.getpid()}-{number}"
        checks: tuple[tuple[bool, Callable[[], str | None]], ...] = (
            (True, lambda: self._check_program(program)),
            (self.store is not None, lambda: self._check_store(name)),
            (self.encrypted, self._check_encryption),
            (self.slot is not None and bool(self.slot.network_interface), self._check_interface),
            (self.store is not None and self.peers > 1, self._check_peers),
        )
        fault = next((said for applies, check in checks if applies and (said := check())), None)
        unreached = self._check_driver()
        clock.sleep(max(0.0, began + self.hold - clock.now()))
        # The parent is the executor's Python daemon: one per executor.
        return ProbeReport(
            facts,
            os.getppid(),
            name,
            fault and f"host {host}{fault}",
            unreached and f"host {host}{unreached}",
        )

    # ---- checks: each returns what is wrong, as the rest of a sentence that begins with the host, or None

    def _check_interface(self) -> str | None:
        interface = self.slot and self.slot.network_interface
        assert interface
        try:
            find_interface_address(interface)
        except InvalidInput as error:
            return f": {error}"
        return None

    def _check_peers(self) -> str | None:
        assert self.store is not None
        folder, address = f"{PROBES}/{self.token}/peers", find_own_address(self.reachable_host)
        try:
            refused = PeerCheck(self.store, folder, address).run(self.peers, SystemClock())
        except StoreError as error:
            return f" could not exchange addresses with other executors, so start the job again: {error}"
        return refused and (
            f" cannot reach {refused}, another executor: workers exchange gradients directly, which serverless "
            "compute does not allow; use a cluster whose executors reach one another, or num_workers=1."
        )

    def _check_encryption(self) -> str | None:
        from spark_elastic.worker.entry import find_tls_problem

        refused = find_tls_problem()
        return refused and f": {refused}, or set tls=False."

    def _check_program(self, program: bytes) -> str | None:
        slot = self.slot if self.slot is not None and self.slot.forks_imports else None
        try:
            error = find_load_error(program) if slot is None else find_load_error_in_fork(program, slot)
        except TimeoutError:
            return (
                f" was still loading {self.what} after {LOAD_SECONDS:.0f} s: see why imports take long there (a busy "
                "machine, Python on a network drive), and start the job again."
            )
        return error and (
            f" cannot load {self.what} ({error}): ship their modules with --py-files or install them there."
        )

    def _check_driver(self) -> str | None:
        if self.driver is None:
            return None
        name, _, port = self.driver.rpartition(":")
        try:
            socket.create_connection((name.strip("[]"), int(port)), REACH_SECONDS).close()
        except OSError as error:
            return (
                f" cannot reach the driver at {self.driver} ({error}): let executors reach it there, or set "
                "advertise_address and driver_port to what they reach."
            )
        return None

    def _check_store(self, name: str) -> str | None:
        assert self.store is not None
        token, url = self.token.encode(), self.store.url
        try:
            is_shared = self.store.read_bytes(f"{PROBES}/{self.token}/driver") == token
        except (ElasticError, OSError):
            is_shared = False
        if not is_shared:
            return f" does not see what the driver wrote to the store {url}: {SHARE}"
        try:
            self.store.write_bytes(name, token)
            if self.store.read_bytes(name) != token:
                return f" reads something else than it wrote in the store {url}."
        except (ElasticError, OSError) as error:
            return (
                f" cannot write to the store {url} ({type(error).__name__}: {error}): give it the right to."
            )
        return None


def make_probe_task(probe: Probe, program: Payload) -> Task:
    """The probe as a nested function, which is pickled by value: it starts even where our package is missing."""
    packed = pickle.dumps(probe)

    def run(numbers: Iterable[int]) -> Iterator[Any]:
        for number in list(numbers):  # consumed, so that Spark uses the Python worker again
            try:
                yield pickle.loads(packed).report(number, program.value)
            except ImportError as error:
                yield socket.gethostname(), str(error), sys.executable

    return run


@contextmanager
def open_probe(spec: ProbeSpec) -> Iterator[Probe]:
    """A probe that finds the driver's object in the store, and its listening socket, as long as the block runs.

    Raises:
        StoreError: the driver cannot write the store. InvalidInput: `bind` cannot be bound.
    """
    token, store, bind = uuid.uuid4().hex, spec.store, spec.bind
    listener = listen(bind) if bind is not None else None  # the kernel accepts connections by itself
    try:
        if store is not None:
            store.write_bytes(f"{PROBES}/{token}/driver", token.encode())
        driver = format_address(bind, listener) if bind is not None and listener is not None else None
        yield Probe(store, token, spec.what, driver, spec.encrypted, slot=spec.slot)
    finally:
        if listener is not None:
            listener.close()
        if store is not None:
            with suppress(StoreError):  # what the block raised says more; `Store.clean` removes what is left
                store.remove_tree(f"{PROBES}/{token}")
                store.remove_empty_folder(PROBES)


def await_probes(
    collect: Callable[[], list[Any]],
    cancel: Callable[[], object],
    queue: JobQueue,
    timeout: float,
    make_thread: Callable[..., threading.Thread] = threading.Thread,
    explain: Callable[[], str | None] = lambda: None,
) -> list[Any]:
    """Run a job of probes in a thread of its own; cancel it if the time is over or the caller is interrupted.

    Args:
        collect: runs the job and returns its rows.
        timeout: seconds; they do not count while another job of the application trains.
        explain: what the cluster was doing when the time was over, if that is known; called before `cancel`.

    Raises:
        PreflightError: the time was over. Exception: what `collect` raised.
    """
    collected: Future[list[Any]] = Future()

    def work() -> None:
        try:
            collected.set_result(collect())
        except Exception as error:
            collected.set_exception(error)

    queue_timeout = QueueTimeout(queue, timeout, SystemClock(), "the preflight of a job")
    thread = make_thread(target=work, name="spark-elastic-preflight", daemon=True)
    thread.start()
    late, why = True, None
    try:
        late = not queue_timeout.join(thread)
        why = explain() if late else None
    finally:
        if late:
            cancel()
            thread.join(CANCEL_SECONDS)
    if late:
        raise PreflightError(
            why
            or f"no executor took a probe within {timeout:.0f} s: see whether the cluster has free cores, or raise "
            "start_timeout."
        )
    return collected.result(0)


# ---- what the reports of probes mean for a job


def require_report(answer: Any) -> ProbeReport:
    """The answer of a probe.

    Raises:
        PreflightError: the host has no spark_elastic, so that the probe could not be loaded.
    """
    if isinstance(answer, ProbeReport):
        return answer
    host, reason, interpreter = answer
    own = f"spark_elastic {spark_elastic.__version__}"
    raise PreflightError(
        f"host {host} cannot load spark_elastic with {interpreter} ({reason}), and the driver has {own} in "
        f"{sys.executable}: set PYSPARK_PYTHON to a Python that has it on every host, install {own} there, or send it "
        "along with ship=True."
    )


def check_reports(
    reports: list[ProbeReport],
    check_versions: Callable[[Mapping[str, Any]], str | None],
    store: Store | None,
    reached: bool = True,
) -> None:
    """Check what all hosts found.

    Args:
        check_versions: as of `ProbeSpec.make_host_check`.
        reached: hosts must reach the driver.

    Raises:
        PreflightError: a host has a fault, or the driver does not see what a host wrote to the store.
    """
    # Versions first: they explain why a program does not load.
    faults = [*(check_versions(report.facts) for report in reports), *(report.fault for report in reports)]
    for fault in [*faults, *(report.unreached for report in reports if reached)]:
        if fault is not None:
            raise PreflightError(fault)
    for report in reports if store is not None else []:
        assert store is not None
        try:
            store.read_bytes(report.written)
        except (ElasticError, OSError) as error:
            raise PreflightError(
                f"the driver does not see what host {report.facts['host']} wrote to the store {store.url}: {SHARE}"
            ) from error


# Packages whose versions must match: spark_elastic exactly (hosts speak its wire format), Python to the minor version
# (cloudpickle carries bytecode), numpy and the frameworks to the major version (pickles and kernels change there, and
# driver and executors may have different builds of one release line).
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
    """A check of hosts: given a host's facts, why it cannot take part in a job of this driver, or None.

    Args:
        driver: the facts of this process.
        needs: frameworks that the job uses; any other may be missing or of any version.
    """
    packages = [p for p in MUST_MATCH if p in ALWAYS_NEEDED or p in needs]

    def check(host: Mapping[str, Any]) -> str | None:
        for package in packages:
            own, theirs, parts = driver.get(package), host.get(package), MUST_MATCH[package]
            if own is None or (
                theirs is not None and str(own).split(".")[:parts] == str(theirs).split(".")[:parts]
            ):
                continue
            has = f"no {package}" if theirs is None else f"{package} {theirs}"
            place = "there" if theirs is None else "on one of them to match"
            name = host.get("host", "unknown")
            return f"host {name} has {has}, and the driver has {own}: install {package} {own} {place}."
        return None

    return check
