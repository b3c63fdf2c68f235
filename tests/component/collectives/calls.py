"""What ranks are asked to do: each function runs in a rank's process and returns what the test compares."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import logging.handlers
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from elastic_collectives import CollectiveError, Group, connect
from elastic_collectives.operands import ALGORITHMS, DTYPES, FLOATS, OPS, divide_evenly, narrow, widen
from tests.component.collectives.ranks import Member
from tests.reductions import reduce_parts

HALVES = ("float16", "bfloat16")
SIZES = (0, 1, 1023, 70_001)


@functools.cache
def _numbers(rank: int, count: int) -> Any:
    return np.random.default_rng([rank, count]).uniform(0.5, 1.9, count)


def share(rank: int, count: int, dtype: str) -> Any:
    """What `rank` hands in: never two alike, and products stay in range."""
    if dtype == "bfloat16":
        return narrow(_numbers(rank, count).astype(np.float32), dtype)
    return (_numbers(rank, count) * (1 if dtype in FLOATS else 1.5)).astype(dtype)


def reduce_everything(member: Member, dtypes: Sequence[str] = DTYPES) -> tuple[list[str], str]:
    """All operations and sizes: what was wrong here, and a digest of all results."""
    group, wrong, digest, turn = member.live, [], hashlib.sha256(), 0
    for dtype, count in itertools.product(dtypes, SIZES):
        own = _slice_part(group, count)
        parts = [share(rank, count, dtype) for rank in range(group.size)]
        name = dtype if dtype == "bfloat16" else None
        for op in OPS:
            if (op == "adasum" and dtype not in FLOATS) or (op == "average" and dtype == "bool"):
                continue
            # All ranks' results are equal by the digest, so that one rank at a time compares the whole with numpy.
            turn += 1
            judges = turn % group.size == group.rank
            expected = reduce_parts(parts, dtype, op, 1.0) if judges else None
            ways = ALGORITHMS if op == "sum" and dtype not in HALVES else ("auto",)
            for way in ways:
                array = parts[group.rank].copy()
                group.allreduce(array, op, way, name)
                digest.update(array.tobytes())
                if judges and not _equals(array, expected, dtype, op):
                    wrong.append(f"allreduce {op} {dtype} {way} {count}")
            if op != "adasum":
                mine = group.reducescatter(parts[group.rank], op, name)
                if not np.array_equal(mine, reduce_parts([part[own] for part in parts], dtype, op, 1.0)):
                    wrong.append(f"reducescatter {op} {dtype} {count}")
    return wrong, digest.hexdigest()


def _slice_part(group: Group, count: int) -> slice:
    """What reducescatter leaves to this rank."""
    bounds = np.cumsum([0, *divide_evenly(count, group.size)])
    return slice(int(bounds[group.rank]), int(bounds[group.rank + 1]))


def _equals(found: Any, expected: Any, dtype: str, op: str) -> bool:
    """Bit by bit, but where the order of summing or the angle of two vectors is not the yardstick's."""
    if op in ("min", "max") or dtype not in FLOATS or (dtype in HALVES and op != "adasum"):
        return np.array_equal(found, expected)
    rtol = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    return np.allclose(widen(found, dtype), widen(expected, dtype), rtol=rtol, atol=0)


def compute_packed_sum(parts: Sequence[Any], wire: str, hosts: Sequence[int] = (), after: float = 1.0) -> Any:
    """What a compressed sum is: packed is what travels, so within each of several hosts float32 is summed as it is.

    hosts: how many ranks each has; empty: all exchange through sockets. after: a factor, on each host's sum.
    """
    if len(hosts) > 1:
        ends = itertools.accumulate(hosts)
        groups = [parts[end - count : end] for count, end in zip(hosts, ends, strict=True)]
        parts = [reduce_parts(group, "float32", "sum", after) for group in groups]
    return widen(reduce_parts([narrow(part, wire) for part in parts], wire, "sum", 1.0), wire)


def reduce_in_chunks(member: Member, hosts: Sequence[int] = ()) -> list[str]:
    """Arrays of several chunks, which are under way at the same time: what was wrong here."""
    group, wrong = member.live, []
    makers = [np.random.default_rng(rank) for rank in range(group.size)]
    whole = [maker.normal(size=2_300_003).astype(np.float32) for maker in makers]
    own = _slice_part(group, len(whole[0]))
    for compression, wire in (("fp16", "float16"), ("bf16", "bfloat16")):
        array = whole[group.rank].copy()
        group.allreduce(array, compression=compression)
        expected = compute_packed_sum([part[own] for part in whole], wire, hosts)
        # The other ranks look at the rest of it, which is the same everywhere.
        same = group.allgather_bytes(hashlib.sha256(array.tobytes()).digest())
        if len(set(same)) > 1 or not np.array_equal(array[own], expected):
            wrong.append(f"allreduce {compression}")
        large = np.full(5000, 20000.0, np.float32)  # the sum of four is beyond float16
        group.allreduce(large, "average", compression=compression)
        if not np.allclose(large, 20000.0, rtol=1e-2):
            wrong.append(f"average of large numbers {compression}")
        mine = group.reducescatter(whole[group.rank], "average", compression=compression)
        packed = [narrow(part[own], wire) for part in whole]
        expected = widen(reduce_parts(packed, wire, "average", 1.0), wire)
        if not np.array_equal(mine, expected):
            wrong.append(f"reducescatter {compression}")
    mine = group.reducescatter(whole[group.rank])
    if not np.array_equal(mine, reduce_parts([part[own] for part in whole], "float32", "sum", 1.0)):
        wrong.append("reducescatter")
    return wrong


def exchange_everything(member: Member) -> list[str]:
    """alltoall of all dtypes with even, ragged and empty splits: what was wrong here."""
    group, wrong = member.live, []
    for dtype, rows in itertools.product(DTYPES, (0, 7, 20_000)):
        splits = [rows * ((group.rank + to) % 3) for to in range(group.size)]
        received, came = group.alltoall(share(group.rank, sum(splits), dtype), splits)
        parts = []
        for source in range(group.size):
            theirs = [rows * ((source + to) % 3) for to in range(group.size)]
            begin = sum(theirs[: group.rank])
            parts.append(share(source, sum(theirs), dtype)[begin : begin + theirs[group.rank]])
        if came != [len(part) for part in parts] or not np.array_equal(received, np.concatenate(parts)):
            wrong.append(f"alltoall {dtype} {rows}")
        even, _ = group.alltoall(share(group.rank, rows * group.size, dtype))
        mine = slice(group.rank * rows, (group.rank + 1) * rows)
        parts = [share(source, rows * group.size, dtype)[mine] for source in range(group.size)]
        if not np.array_equal(even, np.concatenate(parts)):
            wrong.append(f"even alltoall {dtype} {rows}")
    return wrong


def check_other_collectives(member: Member) -> list[str]:
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
    nothing = np.zeros((0, 3), np.float32)
    group.allreduce(nothing, "average", compression="fp16")
    group.broadcast(nothing, 0)
    if (group.allgather(nothing).shape, group.reducescatter(nothing).shape) != ((group.size, 0, 3), (0, 3)):
        wrong.append("nothing")
    if group.allgather_bytes(b"x" * group.rank) != [b"x" * r for r in range(group.size)]:
        wrong.append("allgather_bytes")
    if group.allgather_bytes(b"") != [b""] * group.size:
        wrong.append("allgather_bytes of nothing")
    group.barrier()
    return wrong


# "buffer" is done in memory that ranks of a host share, where they do.
WORK: dict[str, Callable[[Group], object]] = {
    "buffer": lambda group: group.allreduce(np.zeros(1 << 20)),
    "ring": lambda group: group.allreduce(np.zeros(1 << 20), algorithm="ring"),
    "bcube": lambda group: group.allreduce(np.zeros(1 << 16), algorithm="bcube"),
    "float16": lambda group: group.allreduce(np.zeros(1 << 21, np.float16)),
    "compressed": lambda group: group.allreduce(np.zeros(1 << 21, np.float32), compression="bf16"),
    "adasum": lambda group: group.allreduce(np.zeros(1 << 19), "adasum"),
    "weighted": lambda group: group.allreduce(np.zeros(1 << 19), "average", weight=1),
    "grouped": lambda group: group.grouped_allreduce([np.zeros(1 << 19), np.zeros(1 << 19, np.int32)]),
    "reducescatter": lambda group: group.reducescatter(np.zeros(1 << 20)),
    "alltoall": lambda group: group.alltoall(np.zeros(group.size << 18)),
    "broadcast": lambda group: group.broadcast(np.zeros(1 << 20), 0),
    "allgather": lambda group: group.allgather(np.zeros(1 << 18)),
    "allgatherv": lambda group: group.allgatherv(np.zeros((group.rank << 17, 2))),
    "barrier": lambda group: group.barrier(),
    "nothing": lambda group: group.allreduce(np.zeros(0)),
}


def work_until_it_fails(member: Member, work: str, victim: int, number: int) -> None:
    """One collective again and again; meanwhile the victim sends itself a signal."""
    group = member.live
    call = functools.partial(WORK[work], group)
    if work == "buffer":
        call = functools.partial(group.allreduce, group.buffer(8 << 20).view(np.float64))
    group.barrier()
    if group.rank == victim:
        threading.Timer(0.03, os.kill, (os.getpid(), number)).start()
    while True:
        call()


def fork(member: Member) -> int:
    """The pid of a child that does nothing but live."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child


def reduce_once(member: Member, count: int) -> float:
    array = np.full(count, member.live.rank + 1.0)
    member.live.allreduce(array)
    assert (array == array[0]).all()
    return float(array[0])


def exhaust_descriptors(member: Member, seconds: float) -> float:
    """A barrier while the process can open no descriptor, for that long; the processor's seconds it took."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    relief = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard)))
    relief.start()
    begin = time.process_time()
    member.live.barrier()
    relief.join()
    return time.process_time() - begin


def reduce_own_size(member: Member, counts: list[int], algorithm: str) -> None:
    member.live.allreduce(np.zeros(counts[member.live.rank]), algorithm=algorithm)


def barrier(member: Member) -> None:
    member.live.barrier()


def try_everything(member: Member) -> set[str]:
    """The kinds of error that a group of no more use answers with."""
    group, kinds = member.live, set()
    calls = (
        lambda: group.allreduce(np.zeros(3)),
        lambda: group.allreduce(np.zeros(0)),
        lambda: group.broadcast(np.zeros(3), 0),
        lambda: group.allgather(np.zeros(3)),
        lambda: group.allgatherv(np.zeros(3)),
        lambda: group.reducescatter(np.zeros(3)),
        lambda: group.alltoall(np.zeros(group.size)),
        lambda: group.grouped_allreduce([np.zeros(3)]),
        lambda: group.allreduce(np.zeros(3, np.float16)),
        group.barrier,
    )
    for call in calls:
        try:
            call()
            kinds.add("nothing")
        except Exception as error:
            kinds.add(type(error).__name__)
    return kinds


def rebuild(
    member: Member, everybody: list[str], rank: int, first: int, count: int, shared: bool
) -> list[dict[str, int]]:
    """That many generations; what the process holds after a tenth and at the end. shared: all ranks are of one host."""
    blobs, held = [address.encode() for address in everybody], []
    local = list(range(len(blobs))) if shared else None
    for turn in range(count):
        place = rank, len(blobs), (1, first + turn)
        with connect(member.endpoint, *place, lambda own: blobs, 30.0, local_ranks=local) as group:
            kind = np.float16 if turn % 2 else np.float64
            array = group.buffer(64 << 10) if shared else np.ones(1000, kind)
            array[:] = 1
            group.allreduce(array)
            assert array[0] == len(blobs)
            if turn % 10 == 0 and not shared:
                group.reducescatter(array)
                group.alltoall(np.ones(len(blobs)))
        if turn in (count // 10, count - 1):
            held.append(_count_resources())
    return held


def _count_resources() -> dict[str, int]:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    with open("/proc/self/maps") as maps:
        mappings = len(maps.readlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
        "bytes": pages * os.sysconf("SC_PAGESIZE"),
    }


def reduce_late(
    member: Member, delay: float, limit: float | None, gathers: bool = False
) -> list[tuple[float, list[int]]]:
    """A sum, or a gathering, that this rank comes to after so long; what it was told while it waited for others."""
    told: list[tuple[float, list[int]]] = []
    member.live.barrier()
    member.live.set_timeout(limit)
    member.live.watch(lambda seconds, ranks: told.append((seconds, list(ranks))))
    time.sleep(delay)
    member.live.allgather(np.ones(3)) if gathers else member.live.allreduce(np.ones(100_000))
    return told


def reduce_once_limited(member: Member, limit: float) -> None:
    """A sum whose limit is set by another thread, once it has begun."""
    member.live.barrier()
    member.live.set_timeout(None)
    threading.Timer(0.3, member.live.set_timeout, (limit,)).start()
    member.live.allreduce(np.ones(100_000))


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
