"""Where this process stands among the workers: Horovod's names for it. A process that is no worker is alone."""

from __future__ import annotations

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Member
from spark_elastic.worker.context import Current, current, initialized, set_initialized
from spark_elastic.worker.seat import group_of


def init(comm: object = None, process_sets: object = None) -> None:
    """Begin to use this interface. A worker was placed in its world before its function was called."""
    for name, value in (("comm", comm), ("process_sets", process_sets)):
        if value is not None:
            raise InvalidInput(f"init() does not support {name} yet: leave it out.")
    set_initialized(True)


def shutdown() -> None:
    """End the use of this interface; the world goes on until the worker's function ends."""
    set_initialized(False)


def is_initialized() -> bool:
    """Whether `init` was called."""
    return initialized()


def size() -> int:
    """Of the world."""
    here = current()
    return 1 if here is None else group_of(here).size


def rank() -> int:
    """In the world."""
    here = current()
    return 0 if here is None else group_of(here).rank


def local_size() -> int:
    """Workers of the world on this host."""
    me = _me()
    return 1 if me is None else me.local_size


def local_rank() -> int:
    """Among the workers on this host."""
    me = _me()
    return 0 if me is None else me.local_rank


def cross_size() -> int:
    """Hosts that have a worker of this local rank."""
    me = _me()
    return 1 if me is None else me.cross_size


def cross_rank() -> int:
    """Among the workers of the same local rank on all hosts."""
    me = _me()
    return 0 if me is None else me.cross_rank


def free_group() -> Group | None:
    """The world's group for a collective of the main thread: gradients on their way have arrived. None: alone.

    Raises:
        CollectiveError: between two worlds there is none.
    """
    here = current()
    if here is None:
        return None
    here.floor.clear()
    return group_of(here)


def _me() -> Member | None:
    here: Current | None = current()
    if here is None or here.world is None:
        return None
    return here.world.members[group_of(here).rank]
