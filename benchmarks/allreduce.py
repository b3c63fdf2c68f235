"""How long does an allreduce take, against torch.distributed's Gloo?

Processes of one machine; float32, sum: through sockets alone, in the clear and inside TLS, through shared memory, of
arrays that lie in shared memory, and of tensors by name as hand-written loops do it, which puts all ranks' requests in
one order first. All run in the same processes, in turns, round by round, in rotating order; the figure is the median
over all rounds of the slowest rank's time. Beside the table: what one copy of the array takes while all copy theirs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

import spark_elastic.torch as hvd
from benchmarks.parts.budget import within_budget
from benchmarks.parts.ranks import be_worker, find_medians, join_group, run_ranks, take_turns
from benchmarks.parts.report import Row
from elastic_collectives import Group

SIZES = {"4 B": 4, "4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
# And torch, the peer.
WAYS = ("sockets", "sockets with TLS", "shared memory", "in shared memory", "named", "one copy")


def run_rank(pipe: Connection, rank: int, size: int, folder: str, rounds: int) -> None:
    """Send the times by size of array."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with (
        join_group(pipe, rank, size, local_ranks=()) as sockets,
        join_group(pipe, rank, size, local_ranks=(), encrypted=True) as secret,
        join_group(pipe, rank, size) as shared,
        be_worker(shared),
    ):
        times = []
        for count in SIZES.values():
            contenders, repeats = make_contenders([sockets, secret], shared, count), (4 << 20) // count
            times.append(take_turns(contenders, shared.barrier, rounds, 2, max(1, min(20, repeats))))
        pipe.send(times)
    dist.destroy_process_group()


def make_contenders(sockets: list[Group], shared: Group, count: int) -> list[Callable[[], object]]:
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


def measure(ranks: tuple[int, ...] = (2, 4), rounds: int = 21) -> list[Row]:
    """A row per size of array and way, in milliseconds."""
    rows = []
    for size in within_budget(ranks, "ranks:"):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(size, run_rank, folder, rounds, groups=3)
        for name, *times in zip(SIZES, *found, strict=True):
            *ours, theirs = find_medians(times)
            rows += [
                Row(f"{name}, {size} ranks, {way}", own, theirs, "ms")
                for way, own in zip(WAYS, ours, strict=True)
            ]
    return rows
