"""Worlds of threads in this process, over the engine's loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from numpy.random import mtrand

from elastic_collectives import CollectiveError, Endpoint, Group, connect

T = TypeVar("T")
# Runs a function on every rank of a world of so many.
World = Callable[..., list[Any]]
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
