"""Where this process stands among the workers: Horovod's names for it. A process that is no worker is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet, reset_process_sets
from spark_elastic.protocol.types import Member
from spark_elastic.worker.context import WorkerContext, get_context, get_process_context


def init(comm: object = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Begin to use this interface. A worker was placed in its world before its function was called.

    comm: only None; there is no MPI. process_sets: to be added, in this order; "dynamic" adds none, and sets can be
    added later in any case.
    """
    if comm is not None:
        raise InvalidInput(
            "init() takes no communicator: leave comm out, and use process sets for some of the ranks."
        )
    reset_process_sets([] if process_sets in (None, "dynamic") else cast("Any", process_sets))
    get_process_context().is_initialized = True


def shutdown() -> None:
    """End the use of this interface; the world goes on until the worker's function ends."""
    get_process_context().is_initialized = False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return get_process_context().is_initialized


def size() -> int:
    """How many workers the world has."""
    worker = get_context()
    return 1 if worker is None else worker.require_group().size


def rank() -> int:
    """This worker's number in the world, from 0."""
    worker = get_context()
    return 0 if worker is None else worker.require_group().rank


def local_size() -> int:
    """How many workers of the world are on this host."""
    me = _get_member()
    return 1 if me is None else me.local_size


def local_rank() -> int:
    """This worker's number among those on its host, from 0."""
    me = _get_member()
    return 0 if me is None else me.local_rank


def cross_size() -> int:
    """How many hosts have a worker of this local rank."""
    me = _get_member()
    return 1 if me is None else me.cross_size


def cross_rank() -> int:
    """This worker's number among those of the same local rank on all hosts, from 0."""
    me = _get_member()
    return 0 if me is None else me.cross_rank


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of workers."""
    worker = get_context()
    return (
        worker is None
        or worker.world is None
        or len({member.local_size for member in worker.world.members}) == 1
    )


def mpi_threads_supported() -> bool:
    """False, as there is no MPI."""
    return False


def mpi_enabled() -> bool:
    """False, as there is no MPI."""
    return False


def mpi_built() -> bool:
    """False, as there is no MPI."""
    return False


def gloo_enabled() -> bool:
    """True: Gloo's algorithms work between hosts."""
    return True


def gloo_built() -> bool:
    """True: Gloo's algorithms work between hosts."""
    return True


def nccl_built() -> int:
    """0: tensors of GPUs are exchanged through the host."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """False: the engine knows no GPU; tensors of GPUs are exchanged through the host."""
    return False


def rocm_built() -> bool:
    """False: the engine knows no GPU; tensors of GPUs are exchanged through the host."""
    return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: object) -> None:
    """Nothing to check: no part of this interface is built for one framework."""


def _get_member() -> Member | None:
    worker: WorkerContext | None = get_context()
    if worker is None or worker.world is None:
        return None
    return worker.world.members[worker.require_group().rank]
