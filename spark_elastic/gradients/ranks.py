"""Where this process stands in the world: `rank`, `size` and their kin among the workers of a host. Any thread."""

from __future__ import annotations

from spark_elastic.config import find_launched_size
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import world
from spark_elastic.protocol.types import Member
from spark_elastic.worker.context import get_context


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
