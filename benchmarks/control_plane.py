"""The rendezvous server and the driver machine under up to 2,000 real clients, in several processes over loopback.

Every worker is what a real job has: a slot's session (registration, heartbeats, a long poll for orders) and a worker's
(joins, the exchange of addresses, a long poll for updates). A rendezvous is measured from the moment at which all ask
for the next world to the last one that holds all addresses and has said so. The driver has a process, and processor
time, of its own; server and clients share the machine, so that the wall time of many workers is mostly theirs.

Peers, in the same run: torch's TCPStore with one GET per pair of ranks, as torch's Gloo rendezvous asks for addresses,
and three meshes of single GETs over HTTP (our server's own key-value store), as Horovod's Gloo contexts ask for them.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.parts import swarm
from benchmarks.parts.report import Row
from spark_elastic.clock import SystemClock
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.loop import CommandExecutor, DriverLoop, EventQueue
from spark_elastic.driver.ports import Post
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.slot_spec import SlotSpec
from spark_elastic.protocol.types import Limits, heartbeat_interval
from spark_elastic.rendezvous.file_limit import raise_file_limit
from spark_elastic.rendezvous.routes import ServerCallbacks
from spark_elastic.rendezvous.server import RendezvousServer

PROCESSES = 4
ROUNDS = 3
MESHES = 3
CLIENT_TIMEOUT = 300.0
STEADY = 5.0  # seconds
LEASE = 5.0  # seconds; the default, which bounds how rarely slots beat
CONTEXT = mp.get_context("spawn")


# ---- the driver's process


class NoLauncher:
    """The clients come by themselves."""

    def start(self, spec: SlotSpec, post: Post) -> None:
        """Nothing."""

    def launch(self, job: int) -> None:
        """Nothing."""

    def close(self, timeout: float) -> list[str]:
        return []


def drive(pipe: Connection, size: int) -> None:
    """Server and driver loop; answers "cpu" with seconds of processor time and events so far, ends on "end"."""
    inbox: EventQueue = EventQueue()
    count = [0]

    def post(event: DriverEvent) -> None:
        count[0] += 1
        inbox.put(event)

    limits = Limits(size, size, size, gather_timeout=600, lease=3600, regroup_timeout=600)
    clock = SystemClock()
    raise_file_limit(size)
    with RendezvousServer(
        swarm.KEY,
        1,
        ServerCallbacks(post, lambda lines: None, heartbeat_interval=partial(heartbeat_interval, LEASE)),
        clock,
    ) as server:
        effects = CommandExecutor(server, NoLauncher(), lambda kept: None)
        loop = DriverLoop(driver_machine.initial(limits, 1), inbox, effects.execute, clock, Journal())
        loop.start()
        pipe.send(server.address)
        while pipe.recv() == "cpu":
            pipe.send((time.process_time(), count[0]))
        loop.cancel("measured")
        loop.wait(10)
        loop.close()


# ---- the measurements


@dataclass(frozen=True)
class Measurement:
    """What clients of one number take, in seconds; processor time is the driver's."""

    # Of the first rendezvous, connecting included.
    first: float
    # Of a later one.
    again: float
    # Processor time of a later one.
    cpu: float
    # Heartbeats per second that the driver answers at most.
    flat_out: float
    # Heartbeats per second that arrive at the pace that slots are told.
    steady: float
    # The driver's processor share meanwhile.
    steady_cpu: float
    # Three meshes of single GETs; None: too many clients.
    mesh: float | None
    # torch's TCPStore; None: too many clients.
    store: float | None


class Cluster:
    """A driver's process and the clients' processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._driver, theirs = CONTEXT.Pipe()
        self._processes = [CONTEXT.Process(target=drive, args=(theirs, size), daemon=True)]
        self._processes[0].start()
        address = self._driver.recv()
        self._clients = []
        shares = [range(first, size + 1, PROCESSES) for first in range(1, min(size, PROCESSES) + 1)]
        for jobs in shares:
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=swarm.be_clients, args=(theirs, address, jobs, size), daemon=True
            )
            process.start()
            self._clients.append(mine)
            self._processes.append(process)

    def order(self, what: str, argument: Any = None) -> tuple[list[Any], float, float, int]:
        """What the clients answer, when it was said, and the driver's processor seconds and events since."""
        cpu, events = self._usage()
        begun = time.monotonic()
        for pipe in self._clients:
            pipe.send((what, argument))
        answers = [pipe.recv() for pipe in self._clients]
        after, later = self._usage()
        return answers, begun, after - cpu, later - events

    def close(self) -> None:
        for pipe in self._clients:
            pipe.send(None)
        self._driver.send("end")
        for process in self._processes:
            process.join(20)
            process.kill()

    def _usage(self) -> tuple[float, int]:
        self._driver.send("cpu")
        cpu, events = self._driver.recv()
        return cpu, events


def measure_size(size: int, mesh_until: int, store_until: int) -> Measurement:
    cluster = Cluster(size)
    try:
        cluster.order("come")
        answers, begun, _, _ = cluster.order("rendezvous")
        first = max(answers) - begun
        walls, cpus = [], []
        for _ in range(ROUNDS):
            answers, begun, cpu, _ = cluster.order("rendezvous")
            walls.append(max(answers) - begun)
            cpus.append(cpu)
        _, _, _, flat = cluster.order("heartbeat", (STEADY, False))
        _, _, steady_cpu, steady = cluster.order("heartbeat", (STEADY, True))
        mesh = None
        if size <= mesh_until:
            answers, begun, _, _ = cluster.order("mesh", MESHES)
            mesh = max(answers) - begun
    finally:
        cluster.close()
    store = tcp_store(size) if size <= store_until else None
    again, cpu = statistics.median(walls), statistics.median(cpus)
    return Measurement(first, again, cpu, flat / STEADY, steady / STEADY, steady_cpu / STEADY, mesh, store)


# ---- the peer


def tcp_store(size: int) -> float:
    """Seconds for `size` ranks to read each other's address, one by one, from torch's TCPStore."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = []
    for first in range(min(size, PROCESSES)):
        mine, theirs = CONTEXT.Pipe()
        ranks = range(first, size, PROCESSES)
        CONTEXT.Process(target=be_store_clients, args=(theirs, server.port, ranks, size), daemon=True).start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    begun = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    return max(pipe.recv() for pipe in pipes) - begun


def be_store_clients(pipe: Connection, port: int, ranks: Sequence[int], size: int) -> None:
    from torch.distributed import TCPStore

    patience = timedelta(seconds=CLIENT_TIMEOUT)
    stores = [
        TCPStore("127.0.0.1", port, is_master=False, timeout=patience, wait_for_workers=False) for _ in ranks
    ]

    def read(store: Any, rank: int) -> None:
        store.set(str(rank), os.urandom(swarm.BLOB))
        for peer in range(size):
            store.get(str(peer))

    pipe.send("ready")
    pipe.recv()
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(read, stores, ranks))
    pipe.send(time.monotonic())


# ---- the report


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """b of the least-squares line log t = a + b log n."""
    logs = [(math.log(n), math.log(t)) for n, t in points]
    x, y = statistics.fmean(a for a, _ in logs), statistics.fmean(b for _, b in logs)
    return sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)


def make_rows(found: dict[int, Measurement]) -> list[Row]:
    made = []
    for size, m in found.items():
        made.append(Row(f"{size} workers: rendezvous (peer: TCPStore, a GET a pair)", m.again, m.store))
        if m.mesh is not None:
            made.append(Row(f"{size} workers: rendezvous (peer: 3 meshes of single GETs)", m.again, m.mesh))
    large = [(size, m) for size, m in found.items() if size >= 32]
    for size, m in large:
        cpu, pace = (
            m.cpu / size * 1e3,
            f"{size} workers: heartbeats that arrive at the pace that slots are told",
        )
        made += [
            Row(f"{size} workers: first rendezvous, connecting", m.first),
            Row(f"{size} workers: driver's CPU of a rendezvous, per worker", cpu, unit="ms"),
            Row(f"{size} workers: events flat out", m.flat_out, unit="1/s"),
            Row(pace, m.steady, unit="1/s"),
            Row(f"{size} workers: driver's CPU then, per worker", m.steady_cpu / size * 1e3, unit="ms/s"),
        ]
    if len(large) > 1:
        walls, cpus = [(n, m.again) for n, m in large], [(n, m.cpu) for n, m in large]
        made.append(Row("growth: rendezvous ~ N^x, N >= 32", exponent(walls), unit="x"))
        made.append(Row("growth: driver's CPU ~ N^x, N >= 32", exponent(cpus), unit="x"))
    return made


def measure(
    sizes: tuple[int, ...] = (2, 8, 32, 128, 512, 2000), mesh_until: int = 128, store_until: int = 512
) -> list[Row]:
    """mesh_until, store_until: largest sizes for the peers."""
    return make_rows({size: measure_size(size, mesh_until, store_until) for size in sizes})
