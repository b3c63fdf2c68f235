"""How close does an allreduce between two hosts come to what their link can carry?

The hosts are two network namespaces with a link of 1 Gbit/s and 1 ms each way between them (link.cc). Its goodput is
what iperf3 measures there over one TCP connection. The peer of an allreduce is the time that its bytes, 2(N-1)/N of
the array, need at that goodput; then torch.distributed's Gloo over the same link, in turns, and the array sent as
bfloat16 beside float32. Medians of the slowest rank's time. Needs root, iperf3 and a C++ compiler.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.parts.ranks import find_medians, join_group, pass_around, take_turns
from benchmarks.parts.report import Row

HERE = Path(__file__).resolve().parent
HOSTS = {"spark-elastic-a": "10.99.0.1", "spark-elastic-b": "10.99.0.2"}  # namespace: address
RATE, DELAY, MTU = 1e9, 1e-3, 9000  # bits/s, seconds each way, bytes
NBYTES = 64 << 20


@contextmanager
def create_two_hosts() -> Iterator[None]:
    """The namespaces and the wire between them."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        program = f"{folder}/link"
        subprocess.run(
            ["c++", "-O2", "-std=c++17", "-o", program, str(HERE / "link.cc"), "-lpthread"], check=True
        )
        for space in HOSTS:
            ip("netns", "add", space)
            closing.callback(ip, "netns", "del", space)
        spaces = [f"/run/netns/{space}" for space in HOSTS]
        # A wire does not wait for a processor.
        words = ["nice", "-n", "-10", program, *spaces, str(RATE), str(DELAY)]
        wire = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        closing.callback(wire.wait)
        closing.callback(wire.kill)
        assert wire.stdout is not None
        if wire.stdout.readline() != "ready\n":
            raise SystemExit(
                "the link between the namespaces did not come up; it needs root and /dev/net/tun."
            )
        for (space, address), peer in zip(HOSTS.items(), reversed(HOSTS.values()), strict=True):
            ip("-n", space, "address", "add", address, "peer", peer, "dev", "wire0")
            ip("-n", space, "link", "set", "wire0", "mtu", str(MTU), "txqueuelen", "2000", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def build_command(space: str, *words: str) -> list[str]:
    """The command line that runs in a namespace."""
    return ["ip", "netns", "exec", space, *words]


def goodput(seconds: int = 3) -> float:
    """Bytes a second that one TCP connection carries over the link."""
    server, client = HOSTS
    with subprocess.Popen(
        build_command(server, "iperf3", "-s", "-1"), stdout=subprocess.DEVNULL
    ) as listening:
        time.sleep(0.5)
        words = build_command(client, "iperf3", "-c", HOSTS[server], "-t", str(seconds), "-J")
        answer = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        listening.wait(10)
    return float(answer["end"]["sum_received"]["bits_per_second"]) / 8


def run_rank(pipe: Connection, rank: int, size: int, store: str, rounds: int) -> None:
    """Send what each contender takes, in turns."""
    torch.set_num_threads(1)
    per_host = size // 2
    host = rank // per_host
    os.environ["GLOO_SOCKET_IFNAME"] = "wire0"
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    local = range(host * per_host, (host + 1) * per_host)
    with join_group(pipe, rank, size, local_ranks=local, host=list(HOSTS.values())[host]) as group:
        array, tensor = np.zeros(NBYTES // 4, np.float32), torch.zeros(NBYTES // 4)
        calls = [
            lambda: group.allreduce(array),
            lambda: group.allreduce(array, compression="bf16"),
            lambda: dist.all_reduce(tensor),
        ]
        pipe.send(take_turns(calls, group.barrier, rounds, 1))
        group.barrier()
    dist.destroy_process_group()


def run_on_hosts(store: str, per_host: int, rounds: int) -> list[float]:
    """Median seconds of the slowest rank, by contender."""
    pipes, processes, size = [], [], 2 * per_host
    for rank in range(size):
        ours, theirs = socketpair()
        space = list(HOSTS)[rank // per_host]
        call = f"two_hosts.run_rank(Connection({theirs.fileno()}), {rank}, {size}, {store!r}, {rounds})"
        code = f"from multiprocessing.connection import Connection; from benchmarks import two_hosts; {call}"
        words = build_command(space, sys.executable, "-c", code)
        processes.append(subprocess.Popen(words, pass_fds=[theirs.fileno()], cwd=HERE.parent))
        theirs.close()
        pipes.append(Connection(ours.detach()))
    pass_around(pipes)
    times = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.wait()
    return [milliseconds / 1000 for milliseconds in find_medians(times)]


def measure_hosts(per_host: int, rounds: int) -> list[Row]:
    before = goodput()
    with tempfile.TemporaryDirectory() as folder:
        plain, halved, theirs = run_on_hosts(f"{folder}/store", per_host, rounds)
    carried = statistics.mean([before, goodput()])
    # Between the hosts an array crosses the link once each way: 2(N-1)/N of it with one leader a host.
    floor, case = NBYTES / carried, f"64 MB, 2 hosts x {per_host}"
    return [
        Row(f"{case}: goodput of the link, beside its rate", carried * 8 / 1e6, RATE / 1e6, "Mbit/s"),
        Row(f"{case}: float32, beside its bytes at that goodput", plain, floor),
        Row(f"{case}: float32, beside torch gloo", plain, theirs),
        Row(f"{case}: as bfloat16, beside float32", halved, plain),
    ]


def measure(rounds: int = 7, per_host: tuple[int, ...] = (1, 2)) -> list[Row]:
    """per_host: ranks of each host."""
    with create_two_hosts():
        return [row for count in per_host for row in measure_hosts(count, rounds)]
