"""How long does an allreduce take, against torch.distributed's Gloo?

    python benchmarks/allreduce.py --json benchmarks/results/allreduce.json

Processes of one machine; float32, sum: through sockets alone, in the clear and inside TLS, through shared memory, of
arrays that lie in shared memory, and of tensors by name as hand-written loops do it, which puts all ranks' requests in
one order first. All run in the same processes, in turns, round by round, in rotating order; the figure is the median
over all rounds of the slowest rank's time. Beside the table: what one copy of the array takes while all copy theirs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import spark_elastic.torch as hvd
from benchmarks.parts.report import Row, finish, parser
from elastic_collectives import Endpoint, Group, connect
from spark_elastic.protocol.types import Fence, Member, World
from spark_elastic.worker import context
from spark_elastic.worker.context import WorkerContext

SIZES = {"4 B": 4, "4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
KEY = b"a benchmark's key"


# And torch, the peer.
WAYS = ("sockets", "sockets with TLS", "shared memory", "in shared memory", "named", "one copy")


def _run_rank(pipe: Connection, rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)

    def exchange(own: bytes) -> list[bytes]:
        pipe.send(own)
        blobs: list[bytes] = pipe.recv()
        return blobs

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with (
        Endpoint(KEY) as one,
        Endpoint(KEY, encrypted=True) as closed,
        Endpoint(KEY) as other,
        connect(one, rank, size, (1, 1), exchange) as sockets,
        connect(closed, rank, size, (1, 1), exchange) as secret,
        connect(other, rank, size, (1, 1), exchange, local_ranks=range(size)) as shared,
    ):
        _set_context(shared)
        for count in SIZES.values():
            pipe.send(
                _times(_make_contenders([sockets, secret], shared, count), shared.barrier, count, rounds)
            )
    dist.destroy_process_group()


def _set_context(group: Group) -> None:
    """What a worker's loop says of the process before it runs a user's function."""
    size = group.size
    members = tuple(Member(f"w{r}", f"s{r}", "h", r, r, size, 0, 1, None) for r in range(size))
    context.set_context(WorkerContext(f"w{group.rank}", World(Fence(*group.fence), members, None, ""), group))


def _make_contenders(sockets: list[Group], shared: Group, count: int) -> list[Callable[[], object]]:
    plain, copy = np.zeros(count // 4, np.float32), np.zeros(count // 4, np.float32)
    placed = shared.buffer(count).view(np.float32)
    tensor, named = torch.from_numpy(np.zeros_like(plain)), torch.from_numpy(np.zeros_like(plain))
    return [
        *(partial(group.allreduce, plain) for group in sockets),
        lambda: shared.allreduce(plain),
        lambda: shared.allreduce(placed),
        lambda: hvd.allreduce_(named, name="gradient", op=hvd.Sum),
        lambda: np.copyto(copy, plain),
        lambda: dist.all_reduce(tensor),
    ]


def _times(
    calls: list[Callable[[], object]], barrier: Callable[[], None], count: int, rounds: int
) -> list[list[float]]:
    """Seconds per call, by round and contender."""
    repeats = max(1, min(20, (4 << 20) // count))
    times = []
    for turn in range(rounds + 2):  # the first two open connections and touch memory
        taken = [0.0] * len(calls)
        for which in (*range(turn % len(calls), len(calls)), *range(turn % len(calls))):
            taken[which] = _seconds(calls[which], barrier, repeats)
        times.append(taken)
    return times[2:]


def _seconds(call: Callable[[], object], barrier: Callable[[], None], repeats: int) -> float:
    barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def measure(size: int, rounds: int) -> list[Row]:
    """A row per size of array and way, in milliseconds."""
    spawn = get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_run_rank, args=(theirs, rank, size, folder, rounds), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for _ in range(3):
            blobs = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(blobs)
        rows = [
            row for name in SIZES for row in _rows(f"{name}, {size} ranks", [pipe.recv() for pipe in pipes])
        ]
        for process in processes:
            process.join()
    return rows


def _rows(case: str, times: list[list[list[float]]]) -> list[Row]:
    """times: by rank, round and contender."""
    slowest = [
        [max(contender) for contender in zip(*turns, strict=True)] for turns in zip(*times, strict=True)
    ]
    *ours, theirs = (1000 * statistics.median(column) for column in zip(*slowest, strict=True))
    return [Row(f"{case}, {way}", own, theirs, "ms") for way, own in zip(WAYS, ours, strict=True)]


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--rounds", type=int, default=21)
    chosen = arguments.parse_args()
    path: Path | None = chosen.json
    rows = [row for ranks in chosen.ranks for row in measure(ranks, chosen.rounds)]
    finish("allreduce", rows, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
