"""Each thread a worker of one world: what Horovod-like interfaces ask about their process, answered per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from elastic_collectives import Group
from elastic_collectives.fakes import FakeFabric
from spark_elastic.protocol.types import Fence, Member, World
from spark_elastic.worker import context
from spark_elastic.worker.context import Current, Floor

T = TypeVar("T")


class _OfThread(threading.local):
    """`context._Holder`, one for each thread."""

    def __init__(self) -> None:
        self.value: Current | None = None
        self.own = Floor()
        self.call = Floor()
        self.handlers: list[Any] | None = None
        self.initialized = False


def per_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_Holder", _OfThread())


def become(group: Group) -> None:
    """This thread's worker, in the world of that group, all on one host."""
    size = group.size
    members = tuple(Member(f"w{r}", f"s{r}", "h", r, r, size, 0, 1, None) for r in range(size))
    fence = Fence(*group.fence)
    context.set_current(Current(f"w{group.rank}", World(fence, members, None, "a test"), group))


def among_fakes(size: int, work: Callable[[Group], T]) -> list[T]:
    """`work` on each rank of a world of fake groups, in rank order; raises what a rank raised."""
    fabric = FakeFabric(size, timeout=45.0)
    all_done = threading.Barrier(size)

    def be(group: Group) -> T:
        become(group)
        try:
            return work(group)
        finally:
            all_done.wait(45)
            here = context.current()
            assert here is not None
            here.floor.engine.close()

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(be, fabric.groups))
    finally:
        for group in fabric.groups:
            group.close()
