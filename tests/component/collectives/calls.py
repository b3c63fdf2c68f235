"""What ranks are asked to do: each function runs in a rank's process and returns what the test compares."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
from typing import Any

import numpy as np

from elastic_collectives import connect
from elastic_collectives.group import ALGORITHMS, DTYPES, OPS
from tests.component.collectives.ranks import Member

REDUCE = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
SMALL, LARGE = (0, 1, 7, 1023), (300_001, 524_288)


def share(rank: int, count: int, dtype: str) -> Any:
    """What `rank` hands in: never two alike, and products stay in range."""
    values = np.random.default_rng([rank, count]).uniform(0.5, 6.0, count)
    return values.astype(dtype)


def reduce_everything(member: Member) -> tuple[list[str], str]:
    """All ops, dtypes, algorithms and sizes: what was wrong here, and a digest of all results."""
    group, wrong, digest = member.live, [], hashlib.sha256()
    cases = [*itertools.product(OPS, DTYPES, ALGORITHMS, SMALL)]
    cases += [("sum", dtype, way, count) for dtype in DTYPES for way in ALGORITHMS for count in LARGE]
    for op, dtype, way, count in cases:
        array = share(group.rank, count, dtype)
        group.allreduce(array, op, way)
        expected = functools.reduce(REDUCE[op], (share(r, count, dtype) for r in range(group.size)))
        if not np.allclose(array, expected, rtol=1e-5, atol=0):
            wrong.append(f"{op} {dtype} {way} {count}")
        digest.update(array.tobytes())
    return wrong, digest.hexdigest()


def everything_else(member: Member) -> list[str]:
    """Broadcast from all roots, allgather, allgatherv with empty parts, bytes, barrier: what was wrong here."""
    group, wrong = member.live, []
    for root, dtype in itertools.product(range(group.size), ("float32", "uint8", "bool", "float16")):
        array = share(group.rank, 1001, "float64").astype(dtype)
        group.broadcast(array, root)
        if not np.array_equal(array, share(root, 1001, "float64").astype(dtype)):
            wrong.append(f"broadcast from {root} of {dtype}")
    gathered = group.allgather(share(group.rank, 12, "int64").reshape(3, 4))
    if not np.array_equal(gathered, [share(r, 12, "int64").reshape(3, 4) for r in range(group.size)]):
        wrong.append("allgather")
    ragged = group.allgatherv(np.full((3 * group.rank, 2), group.rank, np.int16))
    if not all(np.array_equal(part, np.full((3 * r, 2), r)) for r, part in enumerate(ragged)):
        wrong.append("allgatherv")
    if group.allgather_bytes(b"x" * group.rank) != [b"x" * r for r in range(group.size)]:
        wrong.append("allgather_bytes")
    if group.allgather_bytes(b"") != [b""] * group.size:
        wrong.append("allgather_bytes of nothing")
    group.barrier()
    return wrong


def reduce_until_it_fails(member: Member, victim: int, number: int) -> None:
    """Allreduce after allreduce of 8 MB; meanwhile the victim sends itself a signal."""
    group = member.live
    group.barrier()
    if group.rank == victim:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    array = np.zeros(1 << 20)
    while True:
        group.allreduce(array, algorithm="ring")


def reduce_once(member: Member, count: int) -> float:
    array = np.full(count, member.live.rank + 1.0)
    member.live.allreduce(array)
    assert (array == array[0]).all()
    return float(array[0])


def reduce_own_size(member: Member, counts: list[int], algorithm: str) -> None:
    member.live.allreduce(np.zeros(counts[member.live.rank]), algorithm=algorithm)


def barrier(member: Member) -> None:
    member.live.barrier()


def gather(member: Member) -> None:
    member.live.allgather(np.zeros(3))


def try_everything(member: Member) -> set[str]:
    """The kinds of error that a group of no more use answers with."""
    group, kinds = member.live, set()
    calls = (
        lambda: group.allreduce(np.zeros(3)),
        lambda: group.allreduce(np.zeros(0)),
        lambda: group.broadcast(np.zeros(3), 0),
        lambda: group.allgather(np.zeros(3)),
        lambda: group.allgatherv(np.zeros(3)),
        group.barrier,
    )
    for call in calls:
        try:
            call()
            kinds.add("nothing")
        except Exception as error:
            kinds.add(type(error).__name__)
    return kinds


def rebuild(member: Member, everybody: list[str], rank: int, first: int, count: int) -> list[dict[str, int]]:
    """That many generations, one after the other; what the process holds after a tenth and at the end."""
    blobs = [address.encode() for address in everybody]
    held = []
    for turn in range(count):
        with connect(member.endpoint, rank, len(blobs), (1, first + turn), lambda own: blobs, 30.0) as group:
            array = np.ones(1000)
            group.allreduce(array)
            assert array[0] == len(blobs)
        if turn in (count // 10, count - 1):
            held.append(_held())
    return held


def _held() -> dict[str, int]:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "bytes": pages * os.sysconf("SC_PAGESIZE"),
    }
