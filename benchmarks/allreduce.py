"""How long does an allreduce take, against torch.distributed's Gloo?

    python benchmarks/allreduce.py --json benchmarks/results/allreduce.json

Two processes of one machine; float32, sum. Both engines run in the same processes, alternately, round by round; the
figure is the median over all rounds of the slower rank's time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from elastic_collectives import Endpoint, connect
from report import Row, finish, parser

SIZES = {"4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
KEY = b"a benchmark's key"


def _one_rank(pipe: Connection, rank: int, size: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    with Endpoint(KEY) as endpoint:

        def exchange(own: bytes) -> list[bytes]:
            pipe.send(own)
            blobs: list[bytes] = pipe.recv()
            return blobs

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        with connect(endpoint, rank, size, (1, 1), exchange) as group:
            for count in SIZES.values():
                array = np.zeros(count // 4, np.float32)
                tensor = torch.from_numpy(array)
                ours, theirs = (lambda a=array: group.allreduce(a)), (lambda t=tensor: dist.all_reduce(t))
                repeats = max(1, min(20, (4 << 20) // count))
                times: list[tuple[float, float]] = []
                for turn in range(rounds + 2):  # the first two open connections and touch memory
                    pair = [0.0, 0.0]
                    for which in (turn % 2, 1 - turn % 2):
                        pair[which] = _seconds((ours, theirs)[which], group.barrier, repeats)
                    times.append((pair[0], pair[1]))
                pipe.send(times[2:])
        dist.destroy_process_group()


def _seconds(call: Callable[[], object], barrier: Callable[[], None], repeats: int) -> float:
    barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def measure(size: int, rounds: int) -> list[Row]:
    """One row per size of array, in milliseconds."""
    spawn = get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_one_rank, args=(theirs, rank, size, folder, rounds), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        blobs = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(blobs)
        rows = [_row(f"{name}, {size} ranks", [pipe.recv() for pipe in pipes]) for name in SIZES]
        for process in processes:
            process.join()
    return rows


def _row(case: str, times: list[list[tuple[float, float]]]) -> Row:
    slower = [
        [max(pair) for pair in zip(*(rank[turn] for rank in times), strict=True)]
        for turn in range(len(times[0]))
    ]
    ours, theirs = (1000 * statistics.median(column) for column in zip(*slower, strict=True))
    return Row(case, ours, theirs, "ms")


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=21)
    chosen = arguments.parse_args()
    path: Path | None = chosen.json
    finish("allreduce", measure(chosen.ranks, chosen.rounds), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
