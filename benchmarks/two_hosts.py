"""How close does an allreduce between two hosts come to what their link can carry?

    sudo python benchmarks/two_hosts.py --json benchmarks/results/two_hosts.json

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import numpy as np

from benchmarks.parts.report import Row, finish, parser
from elastic_collectives import Endpoint, Group, connect

HERE = Path(__file__).resolve().parent
HOSTS = {"spark-elastic-a": "10.99.0.1", "spark-elastic-b": "10.99.0.2"}  # namespace: address
RATE, DELAY, MTU = 1e9, 1e-3, 9000  # bits/s, seconds each way, bytes
NBYTES = 64 << 20
KEY = b"a benchmark's key"


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


# ---- a rank


def run_rank(descriptor: int, store: str, rank: int, per_host: int, rounds: int) -> None:
    """Measures in turns and answers with the seconds by contender."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    size = 2 * per_host
    address = list(HOSTS.values())[rank // per_host]
    local = range(rank // per_host * per_host, (rank // per_host + 1) * per_host)

    def exchange(own: bytes) -> list[bytes]:
        pipe.send(own)
        blobs: list[bytes] = pipe.recv()
        return blobs

    os.environ["GLOO_SOCKET_IFNAME"] = "wire0"
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    with Endpoint(KEY, host=address) as endpoint:
        with connect(endpoint, rank, size, (1, 1), exchange, local_ranks=local) as group:
            pipe.send(_times(group, rounds))
            group.barrier()
    dist.destroy_process_group()


def _times(group: Group, rounds: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    array, tensor = np.zeros(NBYTES // 4, np.float32), torch.zeros(NBYTES // 4)
    calls: dict[str, Callable[[], object]] = {
        "float32": lambda: group.allreduce(array),
        "bfloat16": lambda: group.allreduce(array, compression="bf16"),
        "torch": lambda: dist.all_reduce(tensor),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):  # the first opens connections and touches memory
        for name, call in calls.items():
            group.barrier()
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


def measure(store: str, per_host: int, rounds: int) -> dict[str, float]:
    """Median seconds of the slowest rank, by contender."""
    pipes, processes = [], []
    for rank in range(2 * per_host):
        ours, theirs = socketpair()
        space = list(HOSTS)[rank // per_host]
        words = ["--rank", str(rank), "--per-host", str(per_host), "--rounds", str(rounds), "--store", store]
        words = build_command(space, sys.executable, __file__, *words, "--pipe", str(theirs.fileno()))
        processes.append(subprocess.Popen(words, pass_fds=[theirs.fileno()]))
        theirs.close()
        pipes.append(Connection(ours.detach()))
    blobs = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(blobs)
    times = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.wait()
    return {
        name: statistics.median(max(turn) for turn in zip(*(rank[name] for rank in times), strict=True))
        for name in times[0]
    }


def rows(per_host: int, rounds: int) -> list[Row]:
    before = goodput()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(f"{folder}/store", per_host, rounds)
    carried = statistics.mean([before, goodput()])
    # Between the hosts an array crosses the link once each way: 2(N-1)/N of it with one leader a host.
    floor = NBYTES / carried
    case = f"64 MB, 2 hosts x {per_host}"
    return [
        Row(f"{case}: goodput of the link, beside its rate", carried * 8 / 1e6, RATE / 1e6, "Mbit/s"),
        Row(f"{case}: float32, beside its bytes at that goodput", seconds["float32"], floor),
        Row(f"{case}: float32, beside torch gloo", seconds["float32"], seconds["torch"]),
        Row(f"{case}: as bfloat16, beside float32", seconds["bfloat16"], seconds["float32"]),
    ]


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--per-host", type=int, default=0, help="ranks of each host; 0: one, then two")
    arguments.add_argument("--rank", type=int)
    arguments.add_argument("--pipe", type=int)
    arguments.add_argument("--store")
    chosen = arguments.parse_args()
    if chosen.rank is not None:
        run_rank(chosen.pipe, chosen.store, chosen.rank, chosen.per_host, chosen.rounds)
        return 0
    found: list[Row] = []
    with create_two_hosts():
        for per_host in [chosen.per_host] if chosen.per_host else [1, 2]:
            found += rows(per_host, chosen.rounds)
    finish("two_hosts", found, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
