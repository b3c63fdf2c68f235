"""The processes of a benchmark that are ranks of one group on this machine.

A rank is a function of its pipe and rank; it sends what it measured through the pipe. `exchange` tells all ranks each
other's addresses, which the parent passes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

Contenders = Sequence[Callable[[], object]]


def run_ranks(size: int, rank_function: Callable[..., None], *arguments: Any) -> list[Any]:
    """What each rank sent, in rank order. rank_function: takes a pipe, the rank, the size and `arguments`."""
    spawn = get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=rank_function, args=(theirs, rank, size, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    blobs = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(blobs)
    sent = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return sent


def make_exchange(pipe: Connection) -> Callable[[bytes], list[bytes]]:
    """What `elastic_collectives.connect` takes; a rank must call it once."""

    def exchange(own: bytes) -> list[bytes]:
        pipe.send(own)
        blobs: list[bytes] = pipe.recv()
        return blobs

    return exchange


def take_turns(
    contenders: Contenders, barrier: Callable[[], None], rounds: int, warm_up: int, repeats: int = 1
) -> list[list[float]]:
    """Seconds of one call, by round and contender; the contenders' order rotates.

    Args:
        warm_up: rounds before those that count; they open connections and touch memory.
        repeats: calls of each contender in a round.
    """
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
