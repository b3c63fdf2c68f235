"""The processes of a benchmark that are ranks of one group on this machine; contenders that take turns; medians.

A rank is a function of its pipe, rank and size; `join_group` connects it to the others, and it sends what it measured
through the pipe.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.parts.budget import within_budget
from elastic_collectives import Endpoint, Group, connect
from spark_elastic.protocol.types import START, Fence, Member, World
from spark_elastic.worker.context import WorkerContext, set_context

KEY = b"a benchmark's key"
Contenders = Sequence[Callable[[], object]]


def run_ranks(
    size: int, rank_function: Callable[..., None], *arguments: Any, groups: int = 1, go: bool = False
) -> list[Any]:
    """What each rank sent, in rank order. groups: how many the ranks join, one after the other. go: they say that they
    are ready, and wait until all are; then a second answer follows what they sent."""
    spawn = get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=rank_function, args=(theirs, rank, size, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for _ in range(groups):
        pass_around(pipes)
    if go:
        pass_around(pipes)
    sent = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return sent


def pass_around(pipes: Sequence[Connection]) -> None:
    """Send each rank what all ranks have sent."""
    blobs = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(blobs)


@contextmanager
def join_group(pipe: Connection, rank: int, size: int, **options: Any) -> Iterator[Group]:
    """A group of all ranks, in shared memory where `options`, of `connect`, say nothing else."""
    options = {"local_ranks": range(size), **options}
    endpoint = {name: options.pop(name) for name in ("encrypted", "host") if name in options}

    def exchange(own: bytes) -> list[bytes]:
        pipe.send(own)
        blobs: list[bytes] = pipe.recv()
        return blobs if size > 1 else [own]

    with Endpoint(KEY, **endpoint) as end, connect(end, rank, size, (1, 1), exchange, **options) as group:
        yield group


def build_world(size: int) -> World:
    members = tuple(Member(f"{r}-0.1", f"{r}-0", "here", r, r, size, 0, 1, START) for r in range(size))  # type: ignore[arg-type]
    return World(Fence(1, 1), members, 0, "a benchmark")


@contextmanager
def be_worker(group: Group, **fields: Any) -> Iterator[WorkerContext]:
    """What a worker's loop says of the process before it runs a user's function."""
    worker = WorkerContext(f"{group.rank}-0.1", build_world(group.size), group, **fields)
    set_context(worker)
    yield worker
    worker.group_context.close()
    set_context(None)


def take_turns(
    contenders: Contenders, barrier: Callable[[], None], rounds: int, warm_up: int = 3, repeats: int = 1
) -> list[list[float]]:
    """Seconds of one call, by round and contender; the contenders' order rotates. warm_up: rounds before those that
    count, which open connections and touch memory. repeats: calls of each contender in a round."""
    times, count = [], len(contenders)
    for turn in range(rounds + warm_up):
        taken = [0.0] * count
        for which in (*range(turn % count, count), *range(turn % count)):
            barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                contenders[which]()
            taken[which] = (time.perf_counter() - begin) / repeats
        times.append(taken)
    return times[warm_up:]


def find_medians(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Milliseconds of each contender: the median over all rounds of the slowest rank. times: by rank, as `take_turns`
    returns them."""
    slowest = [[max(one) for one in zip(*turns, strict=True)] for turns in zip(*times, strict=True)]
    return [1000 * statistics.median(column) for column in zip(*slowest, strict=True)]


def compare_figures(
    contenders: Mapping[str, Callable[[], Sequence[float]]], rounds: int, warm_up: int = 0
) -> dict[str, list[float]]:
    """Medians of the figures that each contender returns; they take turns."""
    for _ in range(warm_up):
        for call in contenders.values():
            call()
    found: dict[str, list[Sequence[float]]] = {name: [] for name in contenders}
    for _ in within_budget(range(rounds), "round"):
        for name, call in contenders.items():
            found[name].append(call())
    return {
        name: [statistics.median(column) for column in zip(*figures, strict=True)]
        for name, figures in found.items()
    }
