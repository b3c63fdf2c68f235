"""Horovod's names that are the same for every framework; `spark_elastic.torch`, `.tensorflow` and `.keras` export them.

Its `init` and `shutdown`, and what this build has, are defined here. Any thread."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

from elastic_collectives import CollectiveError as HorovodInternalError
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_homogeneous,
    is_process_set_included,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    reset_process_sets,
    size,
)
from spark_elastic.gradients.reduction import Adasum, Average, Compression, Max, Min, Product, ReduceOp, Sum
from spark_elastic.gradients.timeline import start_timeline, stop_timeline
from spark_elastic.handwritten.object_state import HostsUpdatedInterrupt
from spark_elastic.horovod.ops.operations import barrier
from spark_elastic.worker.context import get_process_context


def init(comm: object = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Begin to use this interface. A worker has entered its world before its function is called.

    Args:
        comm: only None, since there is no MPI.
        process_sets: sets to add, in this order; "dynamic" adds none. More sets can be added at any time.
    """
    if comm is not None:
        raise InvalidInput(
            "init() takes no communicator: leave comm out, and use process sets for some of the ranks."
        )
    reset_process_sets([] if process_sets in (None, "dynamic") else cast("Any", process_sets))
    get_process_context().is_initialized = True


def shutdown() -> None:
    """End the use of this interface. The worker stays in its world until its function returns."""
    get_process_context().is_initialized = False


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not called since."""
    return get_process_context().is_initialized


def yes() -> bool:
    """True: the engine uses Gloo's algorithms between hosts."""
    return True


def no() -> bool:
    """False: there is no MPI, DDL or oneCCL, and the engine knows no GPU: their tensors go through host memory."""
    return False


gloo_enabled = gloo_built = yes
mpi_threads_supported = mpi_enabled = mpi_built = no
ddl_built = ccl_built = cuda_built = rocm_built = sycl_built = no


def nccl_built() -> int:
    """The version of the NCCL in this process's torch, which sums gradients on GPUs, as in 22809; 0: it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10_000 + minor * 100 + patch)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: object) -> None:
    """Do nothing: no part of this interface is built for one framework."""


__all__ = [
    "barrier",
    "check_extension",
    "init",
    "is_initialized",
    "shutdown",
    "start_timeline",
    "stop_timeline",
]
__all__ += ["HorovodInternalError", "HostsUpdatedInterrupt"]
__all__ += ["Adasum", "Average", "Compression", "Max", "Min", "Product", "ReduceOp", "Sum"]
__all__ += ["cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size"]
__all__ += ["ProcessSet", "add_process_set", "get_process_set_ids_and_ranks", "global_process_set"]
__all__ += ["is_process_set_included", "remove_process_set"]
__all__ += ["gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built"]
__all__ += ["ccl_built", "cuda_built", "ddl_built", "rocm_built", "sycl_built"]
