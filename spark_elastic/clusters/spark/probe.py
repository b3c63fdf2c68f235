"""A probe of a host: can it load the program, use the store, encrypt, and reach the driver and the other hosts?

A probe runs as a short Spark task and returns a `ProbeReport`; `preflight` turns the first fault into an error. Slots'
processes import this module first, so it imports little itself.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.clusters.spark.host_facts import collect_host_facts, find_own_address
from spark_elastic.clusters.spark.payload import Payload
from spark_elastic.config import find_interface_address
from spark_elastic.errors import ElasticError, InvalidInput, StoreError
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous.addresses import Bind, format_address, listen, split_address
from spark_elastic.worker.child import LOAD_SECONDS, begin_imports, find_load_error, find_load_error_in_fork
from spark_elastic.worker.devices import check_host_device

if TYPE_CHECKING:
    from spark_elastic.data.store import Store

Task: TypeAlias = Callable[[Iterable[int]], Iterator[Any]]

PROBES = "probes"  # folder of the store
HOLD_SECONDS = 0.2  # for which a probe keeps its core, so that the next one goes to another executor
REACH_SECONDS = 5.0  # for a connection to the driver
PEERS_SECONDS = 5.0  # for probes that have not come, and for those that have not finished
DIAL_SECONDS = 3.0  # for a connection to another probe
LOOK_EVERY = 0.1  # seconds between two looks into the store
SHARE = "choose a place that all machines share, such as s3://, hdfs:// or a network drive."


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found."""

    facts: dict[str, str]  # host name and versions: `host_facts.collect_host_facts`
    process: int  # id of the executor's process, to count executors of one host
    written: str  # name of the object that the probe wrote to the store
    fault: str | None  # why the host cannot run the job, in one sentence, or None
    unreached: str | None = None  # why the host cannot reach the driver, in one sentence, or None

    @property
    def executor(self) -> tuple[str, int]:
        return self.facts["host"], self.process


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the probes of a job check, and the body of their tasks."""

    payload: bytes = b""  # cloudpickle of what workers will load; tasks get it by themselves
    what: str = "the program"  # the payload in words, for errors
    loads: bool = True  # the payload; False: where a fork server makes its imports, they only begin
    store: Store | None = None  # the store that driver and hosts must share; None: the job uses none
    needs: tuple[str, ...] = ()  # frameworks that the job uses
    bind: Bind | None = None  # where the job's server will listen; None: it is not checked
    encrypted: bool = False  # workers talk inside TLS
    device: str = "auto"  # the setting of the job
    assigned: bool = False  # whether Spark gives GPUs to the job's slots
    slot: SlotSpec | None = None  # how slots start workers, without address and key; None: not known
    hold: float = HOLD_SECONDS  # seconds for which a probe keeps its core at least
    peers: int = 0  # number of probes that check whether they reach one another; 0: not checked
    reachable_host: str | None = None  # executors' own addresses are those on the way to it
    token: str = ""  # from `open`: names this preflight's objects in the store
    driver: str | None = None  # from `open`: the address that workers will dial

    @property
    def forking_slot(self) -> SlotSpec | None:
        """The slot, if a fork server makes its imports."""
        slot = self.slot
        return slot if slot is not None and slot.fork_workers and slot.imports else None

    def make_host_check(self) -> Callable[[Mapping[str, Any]], str | None]:
        """A check of hosts: given a host's facts, why it cannot take part in the job, or None."""
        own, device, needs, assigned = collect_host_facts(), self.device, self.needs, self.assigned
        check = check_host_device
        return lambda host: find_mismatch(own, host, needs) or check(host, device, needs, assigned)

    @contextmanager
    def open(self) -> Iterator[Probe]:
        """A probe that finds the driver's object in the store, and its listening socket, as long as the block runs.
        Raises StoreError: the driver cannot write the store. InvalidInput: `bind` cannot be bound."""
        token, store, bind = uuid.uuid4().hex, self.store, self.bind
        listener = listen(bind) if bind is not None else None  # the kernel accepts connections by itself
        try:
            if store is not None:
                store.write_bytes(f"{PROBES}/{token}/driver", token.encode())
            driver = format_address(bind, listener) if bind is not None and listener is not None else None
            yield replace(self, token=token, driver=driver)
        finally:
            if listener is not None:
                listener.close()
            if store is not None:
                store.discard(f"{PROBES}/{token}")
                store.remove_empty_folder(PROBES)

    def make_task(self, program: Payload) -> Task:
        """The probe as a nested function, which is pickled by value: it starts even where our package is missing."""
        packed = pickle.dumps(replace(self, payload=b""))

        def run(numbers: Iterable[int]) -> Iterator[Any]:
            for number in list(numbers):  # consumed, so that Spark uses the Python worker again
                try:
                    yield pickle.loads(packed).report(number, program.value)
                except ImportError as error:
                    yield socket.gethostname(), str(error), sys.executable

        return run

    def report(self, number: int, program: bytes) -> ProbeReport:
        """Check this host. It returns what went wrong: if it raised, Spark would try again."""
        clock = SystemClock()
        began = clock.now()
        if self.forking_slot is not None:
            begin_imports(self.forking_slot)  # its server makes them while this process goes on
            importlib.import_module("spark_elastic.clusters.spark.slot_task")
        facts = collect_host_facts()
        host = facts["host"]
        name = f"{PROBES}/{self.token}/{host}-{os.getpid()}-{number}"
        checks: tuple[Callable[[], str | None], ...] = (
            lambda: self._check_program(program),
            lambda: self._check_store(name),
            self._check_network,
            self._check_peers,
        )
        fault = next((said for check in checks if (said := check())), None)
        unreached = self._check_driver()
        clock.sleep(max(0.0, began + self.hold - clock.now()))
        fault, unreached = (said and f"host {host}{said}" for said in (fault, unreached))
        # The parent is the executor's Python daemon: one per executor.
        return ProbeReport(facts, os.getppid(), name, fault, unreached)

    # ---- checks: each returns what is wrong, as the rest of a sentence that begins with the host, or None

    def _check_program(self, program: bytes) -> str | None:
        slot = self.forking_slot
        if slot is not None and not self.loads:
            return None
        try:
            error = find_load_error(program) if slot is None else find_load_error_in_fork(program, slot)
        except TimeoutError:
            return (
                f" was still loading {self.what} after {LOAD_SECONDS:.0f} s: see why imports take long there (a busy "
                "machine, Python on a network drive), and start the job again."
            )
        advice = "ship their modules with --py-files or install them there."
        return error and f" cannot load {self.what} ({error}): {advice}"

    def _check_store(self, name: str) -> str | None:
        if self.store is None:
            return None
        token, url = self.token.encode(), self.store.url
        try:
            is_shared = self.store.read_bytes(f"{PROBES}/{self.token}/driver") == token
        except (ElasticError, OSError):
            is_shared = False
        if not is_shared:
            return f" does not see what the driver wrote to the store {url}: {SHARE}"
        try:
            self.store.write_bytes(name, token)
            is_same = self.store.read_bytes(name) == token
        except (ElasticError, OSError) as error:
            kind = type(error).__name__
            return f" cannot write to the store {url} ({kind}: {error}): give it the right to."
        return None if is_same else f" reads something else than it wrote in the store {url}."

    def _check_network(self) -> str | None:
        if self.encrypted:
            from spark_elastic.worker.entry import find_tls_problem  # it imports the engine, which takes long

            if refused := find_tls_problem():
                return f": {refused}, or set tls=False."
        try:
            if self.slot is not None and self.slot.network_interface:
                find_interface_address(self.slot.network_interface)
        except InvalidInput as error:
            return f": {error}"
        return None

    def _check_peers(self) -> str | None:
        """Compute that isolates its executors is refused before any slot is asked for."""
        if self.store is None or self.peers < 2:
            return None
        folder, address = f"{PROBES}/{self.token}/peers", find_own_address(self.reachable_host)
        try:
            refused = find_unreachable_peer(self.store, folder, address, self.peers, SystemClock())
        except StoreError as error:
            return f" could not exchange addresses with other executors, so start the job again: {error}"
        return refused and (
            f" cannot reach {refused}, another executor: workers exchange gradients directly, which serverless "
            "compute does not allow; use a cluster whose executors reach one another, or num_workers=1."
        )

    def _check_driver(self) -> str | None:
        try:
            if self.driver is not None:
                socket.create_connection(split_address(self.driver), REACH_SECONDS).close()
        except OSError as error:
            return (
                f" cannot reach the driver at {self.driver} ({error}): let executors reach it there, or set "
                "advertise_address and driver_port to what they reach."
            )
        return None


def find_unreachable_peer(store: Store, folder: str, address: str, expected: int, clock: Clock) -> str | None:
    """Exchange addresses with the other of `expected` probes through a folder of the store, and dial each. Blocks for a
    few seconds. Returns an address that cannot be dialled; None also where probes do not run together."""

    def wait_for_names(ending: str, count: int) -> set[str]:
        """The names with that ending, as soon as there are `count`, or those that are there after a while."""
        deadline = clock.now() + PEERS_SECONDS
        while True:
            names = {name for name in store.list(folder) if name.endswith(".done") is bool(ending)}
            if len(names) >= count or clock.now() > deadline:
                return names
            clock.sleep(LOOK_EVERY)

    def read_address(name: str) -> str | None:
        try:
            return store.read_bytes(name).decode()
        except StoreError:
            return None  # it has ended by now

    def is_refused(name: str) -> bool:
        try:
            if (peer := read_address(name)) is not None:
                socket.create_connection(split_address(peer), DIAL_SECONDS).close()
        except OSError:
            return read_address(name) is not None
        return False

    listener = listen(Bind(address))  # the kernel accepts connections by itself
    own = f"{folder}/{uuid.uuid4().hex}"
    try:
        store.write_bytes(own, format_address(Bind(address), listener).encode())
        others = wait_for_names("", expected) - {own}
        refused = next(filter(is_refused, sorted(others)), None)
        store.write_bytes(f"{own}.done", b"")
        wait_for_names(".done", len(others) + 1)
        return None if refused is None else read_address(refused)
    finally:
        listener.close()
        with suppress(StoreError):  # it is removed with the folder of all probes
            store.delete(own)


# Package -> how many leading parts of its version must be equal; None: all of it. spark_elastic exactly (hosts speak
# its wire format), Python to the minor version (cloudpickle carries bytecode), numpy and the frameworks to the major
# version (pickles and kernels change there, and hosts may have different builds of one release line).
MUST_MATCH = {"spark_elastic": None, "python": 2, "numpy": 1, "torch": 1, "tensorflow": 1, "keras": 1}
ALWAYS_NEEDED = ("spark_elastic", "python", "numpy")


def find_mismatch(driver: Mapping[str, Any], host: Mapping[str, Any], needs: tuple[str, ...]) -> str | None:
    """Why a host with these facts cannot take part in a job of a driver with those, or None. needs: frameworks that the
    job uses; any other may be missing or of any version."""
    for package, parts in MUST_MATCH.items():
        own, theirs = driver.get(package), host.get(package)
        if own is None or package not in (*ALWAYS_NEEDED, *needs):
            continue
        if theirs is not None and str(own).split(".")[:parts] == str(theirs).split(".")[:parts]:
            continue
        has = f"no {package}" if theirs is None else f"{package} {theirs}"
        place = "there" if theirs is None else "on one of them to match"
        name = host.get("host", "unknown")
        return f"host {name} has {has}, and the driver has {own}: install {package} {own} {place}."
    return None
