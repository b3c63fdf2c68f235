"""An allreduce between up to 24 hosts: predicted by a LogGP model (`parts/loggp.py`) from other sizes, then measured.

The hosts are network namespaces of this machine with one rank each, and links of a rate and a delay between them
(`parts/link.cc`). For each network and algorithm latency, overhead and gap are fitted to the times of some numbers of
ranks and bytes, and then others are predicted; what a sum costs is measured in one process. All ranks begin at one
moment of the machine's clock, and the time is that of the last rank to end; medians over the rounds.

Columns: what the model says as "ours", what was measured as "peer". A case in which the ranks and the link's program
need more than BUSY of the machine's processors does not measure the network: its row says so, and no fit has it.
Needs root, /dev/net/tun and a C++ compiler.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.parts.loggp import PREDICT, Network, fit
from benchmarks.parts.ranks import join_group, pass_around
from benchmarks.parts.report import Row

NETWORKS = ((1e9, 1e-4), (1e10, 1e-4), (1e9, 0.02), (1e10, 0.02))  # bits a second, seconds of delay
MTU = 65_000  # bytes
BUSY = 0.7  # of the processors' time, above which they are what limits
LEAD = 0.003  # seconds from the order to begin until all begin
KB, MB = 1 << 10, 1 << 20
FITTED_RANKS, OTHER_RANKS = (2, 4, 8, 32), (3, 6, 16, 24)
FITTED_BYTES = {"bcube": (4 * KB, 256 * KB, 4 * MB), "ring": (256 * KB, 4 * MB)}
OTHER_BYTES = {"bcube": (64 * KB, MB), "ring": (MB, 16 * MB)}
SETTINGS = {  # of the hosts' TCP: windows that a long link needs, and no start from anew after a rest
    "tcp_rmem": "4096 1048576 67108864",
    "tcp_wmem": "4096 1048576 67108864",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
    "tcp_congestion_control": "reno",
}


@dataclass(frozen=True)
class Case:
    """What is measured."""

    algorithm: str
    ranks: int
    nbytes: int

    def __str__(self) -> str:
        size = f"{self.nbytes // MB} MB" if self.nbytes >= MB else f"{self.nbytes // KB} KB"
        return f"{self.ranks} ranks, {size}"


@dataclass(frozen=True)
class Took:
    """The median round of a case."""

    seconds: float
    busy: float  # share of the processors' time


class Wire:
    """The program that carries packets."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def set(self, rate: float, delay: float) -> float:
        """Change all links. Returns the mean seconds by which packets since the last change were late."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{rate} {delay}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def processor_time(self) -> float:
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def create_hosts(count: int) -> Iterator[tuple[Wire, list[Connection]]]:
    """Namespaces, their links, and a process in each, which ends when its pipe does."""
    names = [f"spark-elastic-{os.getpid()}-{host}" for host in range(1, count + 1)]
    with ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        source = Path(__file__).parent / "parts" / "link.cc"
        subprocess.run(["c++", "-O2", "-std=c++17", "-o", f"{folder}/link", str(source)], check=True)
        for name in names:
            run_ip("netns", "add", name)
            closing.callback(run_ip, "netns", "del", name)
        words = ["nice", "-n", "-10", f"{folder}/link", *names]  # a wire does not wait for a processor
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        closing.callback(process.wait)
        closing.callback(process.kill)
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise SystemExit("the links between namespaces did not come up: they need root and /dev/net/tun.")
        for host, name in enumerate(names, 1):
            run_ip("-n", name, "address", "add", f"10.98.0.{host}/24", "dev", "wire0")
            run_ip("-n", name, "link", "set", "wire0", "mtu", str(MTU), "txqueuelen", "10000", "up")
        forking, pipes = get_context("fork"), []
        for host, name in enumerate(names, 1):
            ours, theirs = forking.Pipe()
            child = forking.Process(target=be_host, args=(theirs, name, host - 1), daemon=True)
            child.start()
            closing.callback(child.join, 10)
            closing.callback(ours.send, None)
            theirs.close()
            pipes.append(ours)
        yield Wire(process), pipes


def run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def be_host(pipe: Connection, name: str, rank: int) -> None:
    """A host's process: joins the groups that it is told of, until the order is None."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(1, signal.SIGKILL)  # it ends with the program that has started it
    with open(f"/run/netns/{name}") as space:
        if library.setns(space.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    for setting, value in SETTINGS.items():
        Path(f"/proc/sys/net/ipv4/{setting}").write_text(value)
    while order := pipe.recv():
        size, cases, rounds = order
        with join_group(pipe, rank, size, local_ranks=(), host=f"10.98.0.{rank + 1}", timeout=120.0) as group:
            for case in cases:
                array = np.zeros(case.nbytes // 4, np.float32)
                for _ in range(rounds):
                    pipe.send("ready")
                    begin, used = pipe.recv(), time.process_time()
                    time.sleep(max(0.0, begin - time.monotonic()))
                    group.allreduce(array, algorithm=case.algorithm)
                    pipe.send((time.monotonic() - begin, time.process_time() - used))


def measure_cases(
    wire: Wire, pipes: Sequence[Connection], cases: Sequence[Case], rounds: int
) -> dict[Case, Took]:
    """Cases of one number of ranks. Two rounds before those that count open connections and their windows."""
    pipes, took = pipes[: cases[0].ranks], {}
    for pipe in pipes:
        pipe.send((len(pipes), cases, rounds + 2))
    pass_around(pipes)
    for case in cases:
        found = []
        for _ in range(rounds + 2):
            for pipe in pipes:
                pipe.recv()
            begin, used = time.monotonic() + LEAD, wire.processor_time()
            for pipe in pipes:
                pipe.send(begin)
            ends, theirs = zip(*(pipe.recv() for pipe in pipes), strict=True)
            spent = sum(theirs) + wire.processor_time() - used
            found.append((max(ends), spent / max(ends) / len(os.sched_getaffinity(0))))
        seconds, busy = zip(*found[2:], strict=True)
        took[case] = Took(statistics.median(seconds), statistics.median(busy))
    return took


def make_cases(algorithm: str, ranks: Sequence[int], sizes: Sequence[int]) -> list[list[Case]]:
    return [[Case(algorithm, count, nbytes) for nbytes in sizes] for count in ranks]


def measure_sum() -> float:
    """Seconds in which one process adds up a byte of float32, as a segment of the ring."""
    array, times = np.zeros(MB // 4, np.float32), []
    for _ in range(50):
        begin = time.perf_counter()
        np.add(array, array, out=array)
        times.append((time.perf_counter() - begin) / MB)
    return statistics.median(times)


def measure_network(
    wire: Wire, pipes: Sequence[Connection], rate: float, delay: float, rounds: int
) -> list[Row]:
    """The parameters, what they were fitted to, what was predicted, and how far it was off."""
    wire.set(rate, delay)
    rows: list[Row] = []
    counts = [count for count in (*FITTED_RANKS, *OTHER_RANKS) if count <= len(pipes)]
    for algorithm, model in PREDICT.items():
        known: dict[Case, Took] = {}
        others: dict[Case, Took] = {}
        for cases in make_cases(algorithm, counts, FITTED_BYTES[algorithm] + OTHER_BYTES[algorithm]):
            for case, took in measure_cases(wire, pipes, cases, rounds).items():
                fits = case.ranks in FITTED_RANKS and case.nbytes in FITTED_BYTES[algorithm]
                (known if fits else others)[case] = took
        points = [
            (case.ranks, case.nbytes, took.seconds) for case, took in known.items() if took.busy <= BUSY
        ]
        network = fit(algorithm, points, Network(delay + 1e-4, 5e-5, 8 / rate, measure_sum()))
        where = f"{rate / 1e9:.0f} Gbit/s, {delay * 1e3:g} ms, {algorithm}"
        rows += describe(network, where)
        errors = []
        for what, took_by_case in (("fitted", known), ("predicted", others)):
            for case, took in took_by_case.items():
                ours = model(network, case.ranks, case.nbytes)
                busy = took.busy > BUSY
                rows.append(
                    Row(
                        f"{where}, {case}, {'processors busy' if busy else what}",
                        ours * 1e3,
                        took.seconds * 1e3,
                        "ms",
                    )
                )
                if what == "predicted" and not busy:
                    errors.append(abs(ours / took.seconds - 1))
        if errors:
            rows.append(
                Row(
                    f"{where}: error of {len(errors)} of {len(others)} predictions, median",
                    statistics.median(errors),
                    unit="",
                )
            )
            rows.append(Row(f"{where}: the same, largest", max(errors), unit=""))
    return rows


def describe(network: Network, where: str) -> list[Row]:
    return [
        Row(f"{where}: latency", network.latency * 1e3, unit="ms"),
        Row(f"{where}: overhead of a message", network.overhead * 1e6, unit="us"),
        Row(f"{where}: rate", 8 / network.gap / 1e9, unit="Gbit/s"),
    ]


def measure_links(wire: Wire, pipes: Sequence[Connection], rounds: int) -> list[Row]:
    """What the links' program and this machine's TCP carry where no rate holds them back."""
    wire.set(1e15, 0.0)
    rows = []
    for count in (2, len(pipes)):
        case = Case("ring", count, 16 * MB)
        took = measure_cases(wire, pipes, [case], rounds)[case]
        carried = 2 * (count - 1) * case.nbytes * 8 / took.seconds / 1e9
        rows.append(Row(f"links without a rate, {case}: all hosts together", carried, unit="Gbit/s"))
    return rows


def measure(
    networks: tuple[tuple[float, float], ...] = NETWORKS, hosts: int = 32, rounds: int = 5
) -> list[Row]:
    """networks: bits a second and seconds of delay. hosts: the most."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the namespaces
    with create_hosts(hosts) as (wire, pipes):
        rows = measure_links(wire, pipes, rounds)
        for rate, delay in networks:
            rows += measure_network(wire, pipes, rate, delay, rounds)
            late = wire.set(rate, delay) * 1e6
            rows.append(
                Row(f"{rate / 1e9:.0f} Gbit/s, {delay * 1e3:g} ms: packets late, mean", late, unit="us")
            )
        return rows
