"""What ranks that share memory are asked to do, as in calls.py."""

from __future__ import annotations

import itertools
import logging
import logging.handlers
import os
import resource
import time
from typing import Any

import numpy as np

from elastic_collectives import CollectiveError
from tests.component.collectives.ranks import Member

LIMITS = {"files": resource.RLIMIT_FSIZE, "mappings": resource.RLIMIT_AS}
KEPT: list[Any] = []  # in the rank's process


def reduce_in_buffers(member: Member) -> list[str]:
    """Sums of arrays that lie in buffers, at their begin and inside, on all ranks and on some: what was wrong."""
    group, wrong = member.live, []
    total = group.size * (group.size + 1) // 2
    buffer = group.buffer(3 << 20)
    for count, start in ((5, 0), (8193, 0), (500_003, 16), (700_000, 1)):
        for alone in (None, 0, group.size - 1):
            array = buffer[4 * start : 4 * (start + count)].view(np.float32)
            if group.rank == alone:
                array = np.empty(count, np.float32)
            array[:] = np.arange(count) % 97 + group.rank + 1
            group.allreduce(array)
            expected = (np.arange(count) % 97) * group.size + total
            if not np.array_equal(array, expected):
                wrong.append(f"sum of {count} from {start}, without {alone}")
    for root in range(group.size):
        buffer[:] = group.rank
        group.broadcast(buffer, root)
        if not (buffer == root).all():
            wrong.append(f"broadcast from {root}")
    return wrong


def scatter_and_exchange(member: Member) -> list[str]:
    """Parts of less than a staging buffer's slot, and of several, equally and unequally long: what was wrong."""
    group, wrong = member.live, []
    rank, size = group.rank, group.size
    for dtype, rows in itertools.product(("float32", "float16", "int64"), (size, 5, 300_001)):
        array = (np.arange(rows) % 13 + rank).astype(dtype)
        expected = np.array_split(size * (np.arange(rows) % 13) + size * (size - 1) // 2, size)[rank]
        if not np.array_equal(group.reducescatter(array), expected.astype(dtype)):
            wrong.append(f"reducescatter of {rows} {dtype}")
        if not np.array_equal(array, (np.arange(rows) % 13 + rank).astype(dtype)):
            wrong.append(f"operand of {rows} {dtype}")
    for unit in (1, 70_001):
        splits = [unit * (rank + 2 * other) for other in range(size)]  # nothing from 0 to 0
        array = np.arange(sum(splits)) + (rank << 32)
        came, counts = group.alltoall(array, splits)
        begins = [unit * sum(r + 2 * other for other in range(rank)) for r in range(size)]
        parts = [begins[r] + np.arange(counts[r]) + (r << 32) for r in range(size)]
        if counts != [unit * (r + 2 * rank) for r in range(size)] or not np.array_equal(
            came, np.concatenate(parts)
        ):
            wrong.append(f"alltoall of {unit}")
    return wrong


def record_warnings(member: Member) -> None:
    """From here on the process keeps what the engine logs."""
    heard = logging.handlers.BufferingHandler(1000)
    logging.getLogger("elastic_collectives").addHandler(heard)
    KEPT.append(heard)


def read_warnings(member: Member) -> list[str]:
    heard = KEPT.pop()
    logging.getLogger("elastic_collectives").removeHandler(heard)
    return [record.getMessage() for record in heard.buffer]


def segments(member: Member) -> int:
    """How many pieces of unnamed shared memory this process maps, by file."""
    with open("/proc/self/maps") as maps:
        return len({line.split()[4] for line in maps if "memfd:elastic-segment" in line})


def time_end_of_barrier(member: Member, aborts: bool) -> float:
    """When this rank's barrier failed, or when it aborted instead of meeting; by the machine's monotonic clock."""
    if aborts:
        time.sleep(0.02)  # for the others to be blocked; sooner is just as right
        now = time.perf_counter()
        member.live.abort("enough")
        return now
    try:
        while True:
            member.live.barrier()
    except CollectiveError:
        return time.perf_counter()


def refuse_memory(member: Member, limit: str) -> None:
    """From now on this process may not make files of any size, or map anything more."""
    member.live.close()
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    most = {"files": 1 << 16, "mappings": mapped + (1 << 20)}[limit]
    resource.setrlimit(LIMITS[limit], (most, resource.RLIM_INFINITY))


def allow_memory(member: Member, limit: str) -> None:
    resource.setrlimit(LIMITS[limit], (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def keep_buffer(member: Member) -> None:
    buffer = member.live.buffer(1 << 20)
    buffer[:] = 7
    KEPT.append(buffer)


def is_kept_buffer_unchanged(member: Member) -> bool:
    return bool((KEPT.pop() == 7).all())
