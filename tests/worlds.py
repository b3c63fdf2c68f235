"""Worlds of threads in this process, over fakes or over the engine's loopback: each thread is a worker, whom
Horovod-like interfaces ask about their process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from numpy.random import mtrand

from elastic_collectives import CollectiveError, Endpoint, Group, connect
from spark_elastic.protocol.types import Fence, Member, World
from spark_elastic.worker import context
from spark_elastic.worker.context import CollectiveThread, ProcessContext, WorkerContext
from tests.fake_group import FakeFabric

T = TypeVar("T")
# Runs a function on every rank of a world of so many.
Runner = Callable[..., list[Any]]
KEY = b"0123456789abcdef0123456789abcdef"


def run_in_world(
    size: int, work: Callable[[Group], T], generation: int = 1, timeout: float = 45.0
) -> list[T]:
    """`work` on every rank of a world of `size` threads; what it returned, in rank order. Raises what a rank raised."""
    blobs: list[bytes] = [b""] * size
    all_there = threading.Barrier(size)

    def work_as(rank: int) -> T:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            all_there.wait(timeout)
            return blobs

        fence = 1, generation
        with Endpoint(KEY) as endpoint, connect(endpoint, rank, size, fence, exchange, timeout) as group:
            try:
                done = work(group)
            except BaseException:
                all_there.abort()
                raise
            all_there.wait(timeout)  # nobody hangs up on ranks that still read
            return done

    # Ranks are processes to the code: it puts numpy's generator back to what it found, here another rank's.
    generator = mtrand.get_bit_generator() if hasattr(mtrand, "get_bit_generator") else None
    try:
        with ThreadPoolExecutor(size) as pool:
            ranks = [pool.submit(work_as, rank) for rank in range(size)]
    finally:
        if generator is not None:
            mtrand.set_bit_generator(generator)
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError | CollectiveError)):
        raise error  # the cause before its consequences
    return [rank.result() for rank in ranks]


class _ContextPerThread(threading.local, ProcessContext):
    """`context._process`, one for each thread."""

    def __init__(self) -> None:
        ProcessContext.__init__(self)


def use_context_per_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_process", _ContextPerThread())


def enter_group(group: Group) -> None:
    """This thread's worker, in the world of that group, all on one host."""
    size = group.size
    members = tuple(Member(f"w{r}", f"s{r}", "h", r, r, size, 0, 1, None) for r in range(size))
    fence = Fence(*group.fence)
    world = World(fence, members, None, "a test")
    context.set_context(WorkerContext(f"w{group.rank}", world.view_of(f"w{group.rank}"), group))


def run_in_fake_world(size: int, work: Callable[[Group], T]) -> list[T]:
    """`work` on each rank of a world of fake groups, in rank order; raises what a rank raised."""
    fabric = FakeFabric(size, timeout=45.0)
    all_done = threading.Barrier(size)

    def work_as(group: Group) -> T:
        enter_group(group)
        try:
            return work(group)
        finally:
            all_done.wait(45)
            worker = context.get_context()
            assert worker is not None
            worker.group_context.collective_thread.close()

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work_as, fabric.groups))
    finally:
        for group in fabric.groups:
            group.close()


def run_on_engine(size: int, work: Callable[[Group], T], generation: int = 1) -> list[T]:
    """As `run_in_fake_world`, over the real engine."""
    threads: list[CollectiveThread] = []

    def work_as(group: Group) -> T:
        enter_group(group)
        threads.append(context.get_group_context().collective_thread)  # type: ignore[attr-defined]
        return work(group)

    try:
        return run_in_world(size, work_as, generation)
    finally:
        for thread in threads:
            thread.close()
