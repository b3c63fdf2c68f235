"""Loaders on the ranks of a world, which this process is one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from spark_elastic.handwritten import data_loader
from spark_elastic.handwritten.torch_state import ElasticDataLoader


class LoaderWorld:
    """What loaders take for this worker's world."""

    rank, size = 0, 1


def enter_world(patch: pytest.MonkeyPatch) -> None:
    """Of a `LoaderWorld`, alone at first."""
    LoaderWorld.rank, LoaderWorld.size = 0, 1
    patch.setattr(data_loader, "rank", lambda: LoaderWorld.rank)
    patch.setattr(data_loader, "size", lambda: LoaderWorld.size)
    patch.setattr(data_loader, "use_deterministic_arithmetic", lambda: None)


def be_each_rank(size: int) -> Iterator[int]:
    """Of a world of that size; alone again behind it."""
    LoaderWorld.size = size
    for LoaderWorld.rank in range(size):
        yield LoaderWorld.rank
    LoaderWorld.rank, LoaderWorld.size = 0, 1


class Exchange:
    """An optimizer's exchange of gradients, which a loader tells the virtual shares."""

    def __init__(self) -> None:
        self.shares: list[str] = []

    def begin_share(self) -> None:
        self.shares.append("begin")

    def end_share(self) -> None:
        self.shares.append("end")


def list_shares(
    make: Callable[[], ElasticDataLoader],
    size: int,
    describe: Callable[[Any, float], list[Any]],
    epochs: int = 1,
) -> list[list[list[Any]]]:
    """By step and share, what `describe` tells of the share's batch and its weight."""
    steps: list[list[list[Any]]] = []
    for rank in be_each_rank(size):
        exchange, loader = Exchange(), make()
        loader.attach_sync(exchange)
        taken = 0
        for number, shares in enumerate(chain.from_iterable(repeat(loader, epochs))):
            if rank == 0:
                steps.append([])
            for batch in shares:
                steps[number].append(describe(batch, loader.loss_weight))
                taken += 1
        assert exchange.shares == ["begin", "end"] * taken
    return steps
