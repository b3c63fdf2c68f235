"""The current world: its group, its process sets, and where this process stands in it. Any thread.

A process set names ranks: in each world it consists of those of its ranks that the world has. When the world grows
again, its ranks are back in the set, whichever workers have them. A process that is no worker is a world of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from elastic_collectives import Group
from elastic_collectives.operands import Array, apply_scale, narrow, widen
from spark_elastic.config import find_launched_size
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Member
from spark_elastic.worker.context import get_call_context, get_context


class SingleProcessGroup:
    """The part of `Group` that operations use, for a process that is no worker: its collectives return at once."""

    rank = 0
    size = 1
    members = (0,)
    fence = (0, 0)
    timeout = 60.0

    def grouped_allreduce(self, arrays: Sequence[Array], op: str, *how: Any) -> None:
        for array in arrays:
            array[...] = self.reducescatter(array, op, *how)

    def reducescatter(
        self, array: Array, op: str, dtype: str | None, weight: None, scale: tuple[float, float], *how: Any
    ) -> Array:
        name, own = dtype or array.dtype.name, array.copy()
        for factor in scale:
            own = narrow(apply_scale(widen(own, name), factor), name)
        return own

    def broadcast(self, array: Array, root: int) -> None:
        """Do nothing: there are no peers."""

    def allgatherv(self, array: Array) -> list[Array]:
        return [array.copy()]

    def alltoall(self, array: Array, splits: Sequence[int] | None = None) -> tuple[Array, list[int]]:
        return array.copy(), [len(array)]

    def barrier(self) -> None:
        """Do nothing: there are no peers."""


def world() -> Group:
    """Return the group of all ranks. Only the main thread may call its collectives. Raises CollectiveError if the
    worker is between two worlds."""
    worker = get_context()
    return cast("Group", SingleProcessGroup()) if worker is None else worker.require_group()


class ProcessSet:
    """Some of the world's ranks, with operations of their own. `add_process_set` makes it usable."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise InvalidInput(f"a ProcessSet takes ranks and no MPI communicator; got {ranks_or_comm!r}.")
        named = [int(rank) for rank in ranks_or_comm]
        self.process_set_id: int | None = None  # None until the set was added
        self._ranks = tuple(sorted(set(named)))
        if len(self._ranks) < len(named) or (self._ranks and self._ranks[0] < 0):
            raise InvalidInput(f"the ranks of a ProcessSet must be different and not below 0; got {named}.")

    @property
    def declared_ranks(self) -> tuple[int, ...]:
        """The ranks it was made from, which identify the set in every world; empty for the global set."""
        return self._ranks

    @property
    def ranks(self) -> list[int]:
        """Those of its ranks that the current world has."""
        size = world().size
        return [rank for rank in self._ranks if rank < size]

    def included(self) -> bool:
        """Whether this process is in the set."""
        return world().rank in self.ranks

    def rank(self) -> int:
        """Return the rank of this process within the set. Raises InvalidInput if the process is not in the set."""
        if not self.included():
            raise InvalidInput(f"rank {world().rank} is not in {self}.")
        return self.ranks.index(world().rank)

    def size(self) -> int:
        """Return how many of its ranks the current world has."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={list(self._ranks)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self._ranks)


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(world().size))

    def __repr__(self) -> str:
        return "ProcessSet(process_set_id=0, all ranks)"


ALL = global_process_set = _GlobalProcessSet()  # all ranks of the world; the second name is Horovod's


@dataclass
class _Registry:
    """The process sets of one call of the user's function."""

    added: dict[int, ProcessSet] = field(default_factory=dict)  # by id
    newest: int = 0  # the id that was given out last


def _get_registry() -> _Registry:
    return get_call_context().get_or_create(_Registry)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set; to be called on all ranks of the world. Ranks exchange nothing before its first operation. It may
    name ranks that only a larger world has. Raises InvalidInput if a set of these ranks was added already."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    registry = _get_registry()
    if any(other.declared_ranks == added.declared_ranks for other in registry.added.values()):
        raise InvalidInput(f"{added} was added already.")
    registry.newest += 1
    added.process_set_id = registry.newest
    registry.added[registry.newest] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Returns False if it was not added, and for the global set."""
    number = process_set.process_set_id
    if number is None or _get_registry().added.pop(number, None) is None:
        return False
    process_set.process_set_id = None
    return True


def reset_process_sets(process_sets: Iterable[ProcessSet | Sequence[int]] = ()) -> None:
    """Remove all sets, and add these."""
    registry = _get_registry()
    for former in list(registry.added.values()):
        remove_process_set(former)
    registry.newest = 0
    for process_set in process_sets:
        if process_set is not ALL:
            add_process_set(process_set)


def _get_sets() -> dict[int, ProcessSet]:
    return {0: ALL, **_get_registry().added}


def is_added(process_set: ProcessSet) -> bool:
    """Whether this call of the user's function added the set, under the id that it has; true for the global set."""
    number = process_set.process_set_id
    return number is not None and _get_sets().get(number) == process_set


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return all sets by id, the global one (0) included, with those of their ranks that the current world has."""
    return {number: process_set.ranks for number, process_set in _get_sets().items()}


def is_process_set_included(process_set_id: int) -> bool:
    """Whether this process is in the set of that id. Raises InvalidInput if there is no such set."""
    return get_process_set(process_set_id).included()


def get_process_set(process_set_id: int) -> ProcessSet:
    """Return the set of that id; 0 is the global one. Raises InvalidInput if there is no such set."""
    sets = _get_sets()
    if process_set_id not in sets:
        raise InvalidInput(f"there is no process set {process_set_id}: add it first.")
    return sets[process_set_id]


def find_root_index(process_set: ProcessSet, root_rank: int) -> int:
    """Return the rank within the set of a rank of the world. Raises InvalidInput if that rank is not in the set."""
    if root_rank not in process_set.ranks:
        raise InvalidInput(f"root_rank must be one of {process_set.ranks}; got {root_rank}.")
    return process_set.ranks.index(root_rank)


def is_single_process(process_set: ProcessSet) -> bool:
    """Whether this process has no peers to exchange gradients with: the set has one rank, or not this one."""
    return process_set.size() <= 1 or not process_set.included()


def choose_channel(use: str, *key: object) -> int:
    """Return the channel of a subgroup: the same on all of its ranks, and of no other use or key. use: what the group
    is for. key: what tells it from others of that use; equal on all of its ranks."""
    return 1 + int.from_bytes(hashlib.sha256(f"{use} {key}".encode()).digest()[:7], "little")


def check_alone(what: str, instead: str) -> None:
    """Refuse what would train alone in silence: this process is no worker, but one of several of another launcher."""
    if get_context() is None and (launched := find_launched_size()) > 1:
        raise InvalidInput(
            f"{what} knows none of the {launched} processes that torchrun, or another launcher, has started: "
            f"{instead}, or start the program with spark-elastic-run."
        )


def size() -> int:
    """Return the number of workers in the world."""
    return world().size


def rank() -> int:
    """Return this worker's rank in the world, from 0."""
    return world().rank


def local_size() -> int:
    """Return the number of workers on this host."""
    member = _get_member()
    return 1 if member is None else member.local_size


def local_rank() -> int:
    """Return this worker's rank among those on its host, from 0."""
    member = _get_member()
    return 0 if member is None else member.local_rank


def cross_size() -> int:
    """Return the number of hosts that have a worker of this local rank."""
    member = _get_member()
    return 1 if member is None else member.cross_size


def cross_rank() -> int:
    """Return this worker's rank among those of the same local rank on all hosts, from 0."""
    member = _get_member()
    return 0 if member is None else member.cross_rank


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of workers."""
    worker = get_context()
    return worker is None or worker.world is None or worker.world.is_homogeneous


def _get_member() -> Member | None:
    worker = get_context()
    return None if worker is None or worker.world is None else worker.world.me
