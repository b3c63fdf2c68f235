"""The rendezvous server and the driver machine under up to 10,000 real clients over loopback.

Every worker is what a real job has: a slot's session (registration, heartbeats, a long poll for orders) and a worker's
(asks for worlds, for peers' addresses, a long poll for updates). The clients are a program in C++ with one thread
(`parts/swarm.cc`), on one core; the driver has the other. Its own processor time stands beside the driver's, so that
nobody takes the generator for the driver. Where this machine may open too few files for four connections a worker, each
has one and sends its requests one after the other.

A rendezvous is measured from the moment at which all ask for the next world to the last one that has told that it has
formed it; the first one with registration and connecting; a loss from the kill of a worker.

Peers, in the same run: torchrun's own rendezvous (c10d, over torch's TCPStore) with one agent a worker, and TCPStore
with one GET per pair of ranks, as torch's Gloo rendezvous asks for addresses.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.parts.budget import within_budget
from benchmarks.parts.ranks import run_ranks
from benchmarks.parts.report import Row
from spark_elastic.clock import SystemClock
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.loop import DriverLoop, EventQueue, execute
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.types import Limits, heartbeat_interval
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.messages import VERSION
from spark_elastic.rendezvous.server import RendezvousServer, ServerCallbacks
from spark_elastic.rendezvous.server_state import SMALL_WORLD

KEY = b"k" * 32
BLOB = 120  # bytes that a rank hands in at a peer
PROCESSES = 4  # of the peers
ROUNDS = 3  # of many workers
CLIENT_TIMEOUT = timedelta(seconds=300)
STEADY = 3.0  # seconds
LEASE = 5.0  # seconds; the default, which bounds how rarely slots beat
FILES_PER_WORKER = 4
CONTEXT = mp.get_context("spawn")


# ---- the driver's process


def choose_cores(place: int) -> set[int]:
    """The first core, or all others: the driver has a core of its own if there are several."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]} if place == 0 else set(cores[1:] or cores)


class NoLauncher:
    """The clients come by themselves."""

    def launch(self, launch: int) -> None:
        pass


def drive(pipe: Connection, size: int) -> None:
    """Server and driver loop; answers "cpu" with seconds of processor time and events so far, ends on "end"."""
    inbox: EventQueue = EventQueue()
    count = [0]

    def post(event: DriverEvent) -> None:
        count[0] += 1
        inbox.add(event)

    os.sched_setaffinity(0, choose_cores(0))
    limits = Limits(size, 1, size, gather_timeout=600, lease=3600, regroup_timeout=600)
    clock = SystemClock()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    pace = partial(heartbeat_interval, LEASE)
    callbacks = ServerCallbacks(post, lambda lines: None, heartbeat_interval=pace, wake=inbox.wake)
    with RendezvousServer(KEY, 1, callbacks, clock) as server:
        effects = partial(execute, server, NoLauncher(), lambda kept: None)
        loop = DriverLoop(driver_machine.initial(limits, 1), inbox, effects, clock, Journal())
        loop.start()
        pipe.send(server.address)
        while pipe.recv() == "cpu":
            pipe.send((time.process_time(), count[0]))
        loop.cancel("measured")
        loop.wait(10)
        loop.close()


# ---- the measurements


@dataclass(frozen=True)
class Took:
    """What an order to all clients took."""

    wall: float  # seconds
    driver: float  # the driver's processor seconds
    clients: float  # the clients'
    head_bytes: int  # of all answers
    body_bytes: int  # the same


class Cluster:
    """A driver's process and the clients' process."""

    def __init__(self, program: Path, size: int, connections: int) -> None:
        _, self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._driver, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=drive, args=(theirs, size), daemon=True)
        self._process.start()
        host, port = self._driver.recv().split(":")
        command = [str(program), host, port, KEY.hex(), str(size), str(connections)]
        self._clients = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(self._clients.pid, choose_cores(1))
        resource.prlimit(self._clients.pid, resource.RLIMIT_NOFILE, (self._files, self._files))
        self._clients_cpu = 0.0

    def order(self, what: str) -> Took:
        assert self._clients.stdin is not None
        assert self._clients.stdout is not None
        before, _ = self.read_usage()
        self._clients.stdin.write(what + "\n")
        self._clients.stdin.flush()
        begun, ended, cpu, _, heads, bodies = map(float, self._clients.stdout.readline().split())
        own, self._clients_cpu = cpu - self._clients_cpu, cpu
        return Took(ended - begun, self.read_usage()[0] - before, own, int(heads), int(bodies))

    def read_usage(self) -> tuple[float, int]:
        """The driver's processor seconds and events so far."""
        self._driver.send("cpu")
        cpu, events = self._driver.recv()
        return cpu, events

    def count_beats(self, seconds: float, *, paced: bool) -> tuple[float, float]:
        """Heartbeats per second, and the driver's processor share meanwhile."""
        _, before = self.read_usage()
        took = self.order(f"beat {seconds} {paced:d}")
        _, after = self.read_usage()
        return (after - before) / seconds, took.driver / seconds

    def close(self) -> None:
        self._clients.kill()
        self._clients.communicate()
        self._driver.send("end")
        self._process.join(20)
        self._process.kill()


def build_clients(folder: Path) -> Path:
    """The clients' program, from its source."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise InvalidInput("The benchmark's clients are C++: install g++ and OpenSSL's headers (libssl-dev).")
    source, program = Path(__file__).parent / "parts" / "swarm.cc", folder / "swarm"
    options = "-std=c++17", "-O2", "-Wno-deprecated-declarations"
    names = {"WIRE_VERSION": VERSION, "SMALL_WORLD": SMALL_WORLD, "SIGNATURE_DIGITS": auth.SIGNATURE_DIGITS}
    names["SIGNATURE_FIELD"] = f'"{auth.REPLY_HEADER}"'
    wire = [f"-D{name}={value}" for name, value in names.items()]  # what the product speaks now
    subprocess.run([compiler, *options, *wire, str(source), "-lcrypto", "-o", str(program)], check=True)
    return program


def measure_size(program: Path, size: int, with_store: bool, with_c10d: bool) -> tuple[list[Row], Took, Took]:
    """Its rows, the first rendezvous and a loss."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_all = FILES_PER_WORKER * size + 256 < files
    cluster, workers = Cluster(program, size, FILES_PER_WORKER if has_all else 1), f"{size} workers"
    beats = []
    try:
        come, first = cluster.order("come"), cluster.order("rendezvous")
        later = first
        if has_all:  # with one connection each, workers cannot ask of themselves
            later = find_median([cluster.order("rendezvous") for _ in range(count_rounds(size))])
        if has_all and size >= 32:
            most, _ = cluster.count_beats(STEADY, paced=False)
            steady, cpu = cluster.count_beats(STEADY, paced=True)
            beats = [
                Row(f"{workers}: heartbeats flat out", most, unit="1/s"),
                Row(f"{workers}: heartbeats that arrive at the pace that slots are told", steady, unit="1/s"),
                Row(f"{workers}: driver's CPU then, per worker", cpu / size * 1e3, unit="ms/s"),
            ]
        losses = min(ROUNDS, size - 1)
        loss = find_median([cluster.order(f"lose {size // 2 - number}") for number in range(losses)])
    finally:
        cluster.close()
    store = measure_peers(be_store_clients, size, count_rounds(size)) if with_store else None
    c10d = measure_peers(be_agents, size) if with_c10d else None
    with_heads = loss.head_bytes + loss.body_bytes
    rows = [
        Row(f"{workers}: rendezvous (peer: TCPStore, a GET a pair)", later.wall, store),
        Row(f"{workers}: first rendezvous, registering and connecting", come.wall + first.wall),
        Row(f"{workers}: first rendezvous alone (peer: torchrun's, c10d)", first.wall, c10d),
        Row(f"{workers}: next world after a loss", loss.wall),
        *make_cpu_rows(f"{workers}: a first rendezvous,", size, first),
        *make_cpu_rows(f"{workers}: a loss,", size, loss),
        Row(f"{workers}: a loss, bytes to a worker (bodies)", loss.body_bytes / size, unit="B"),
        Row(f"{workers}: a loss, bytes to a worker (with heads)", with_heads / size, unit="B"),
        *beats,
    ]
    return rows, first, loss


def count_rounds(size: int) -> int:
    """Of a few workers more, since each is short."""
    return ROUNDS if size > 128 else 5 * ROUNDS


def find_median(all_took: list[Took]) -> Took:
    return sorted(all_took, key=lambda took: took.wall)[len(all_took) // 2]


# ---- the peers


def measure_peers(clients: Callable[..., None], size: int, rounds: int = 1) -> float:
    """Seconds that these clients of torch's TCPStore take, in several processes; the median."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = min(size, PROCESSES)
    found = run_ranks(processes, clients, server.port, size, rounds, groups=rounds)
    walls = [
        max(ended for _, ended in each) - min(begun for begun, _ in each) for each in zip(*found, strict=True)
    ]
    return statistics.median(walls)


def open_stores(port: int, process: int, processes: int, size: int) -> dict[int, Any]:
    """By rank, of those of this process."""
    from torch.distributed import TCPStore

    options: dict[str, Any] = {"is_master": False, "wait_for_workers": False, "timeout": CLIENT_TIMEOUT}
    return {rank: TCPStore("127.0.0.1", port, **options) for rank in range(process, size, processes)}


def time_rounds(pipe: Connection, rounds: int, take: Callable[[int], object]) -> None:
    """Send when each round began and ended; all processes begin a round together."""
    times = []
    for number in range(rounds):
        pipe.send("ready")
        pipe.recv()
        begun = time.monotonic()
        take(number)
        times.append((begun, time.monotonic()))
    pipe.send(times)


def be_store_clients(
    pipe: Connection, process: int, processes: int, port: int, size: int, rounds: int
) -> None:
    """Ranks that read each other's address, one by one."""
    stores = open_stores(port, process, processes, size)

    def read(rank: int, number: int) -> None:
        stores[rank].set(f"{number}/{rank}", os.urandom(BLOB))
        for peer in range(size):
            stores[rank].get(f"{number}/{peer}")

    with ThreadPoolExecutor(len(stores)) as pool:
        time_rounds(pipe, rounds, lambda number: list(pool.map(partial(read, number=number), stores)))


def be_agents(pipe: Connection, process: int, processes: int, port: int, size: int, rounds: int) -> None:
    """Agents of torchrun that form a first world by its own rendezvous."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    agents = []
    for store in open_stores(port, process, processes, size).values():
        backend, make = C10dRendezvousBackend(store, "job"), DynamicRendezvousHandler.from_backend
        agents.append(make("job", store, backend, size, size, local_addr="127.0.0.1"))
    with ThreadPoolExecutor(len(agents)) as pool:
        time_rounds(pipe, rounds, lambda number: list(pool.map(lambda a: a.next_rendezvous(), agents)))
    os._exit(0)  # the agents' heartbeats run on


# ---- the report


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """b of the least-squares line log t = a + b log n."""
    sizes, times = (list(map(math.log, values)) for values in zip(*points, strict=True))
    return statistics.linear_regression(sizes, times).slope


def make_cpu_rows(what: str, size: int, took: Took) -> list[Row]:
    return [
        Row(f"{what} driver's CPU per worker", took.driver / size * 1e3, unit="ms"),
        Row(f"{what} clients' CPU per worker", took.clients / size * 1e3, unit="ms"),
    ]


def measure(
    sizes: tuple[int, ...] = (2, 8, 32, 128, 512, 2000, 10000), store_until: int = 128, c10d_until: int = 32
) -> list[Row]:
    """store_until, c10d_until: largest sizes for the peers."""
    rows: list[Row] = []
    firsts, losses = [], []  # (size, the driver's processor seconds), of large sizes
    with tempfile.TemporaryDirectory() as folder:
        program = build_clients(Path(folder))
        for size in within_budget(sizes, "workers:"):
            found, first, loss = measure_size(program, size, size <= store_until, size <= c10d_until)
            rows += found
            if size >= 128:
                firsts.append((size, first.driver))
                losses.append((size, loss.driver))
    if len(firsts) > 1:
        for what, points in (("a first rendezvous", firsts), ("a loss", losses)):
            rows.append(Row(f"growth: driver's CPU of {what} ~ N^x, N >= 128", exponent(points), unit="x"))
    return rows
