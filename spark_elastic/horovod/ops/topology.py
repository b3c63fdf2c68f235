"""Horovod's `init` and `shutdown`, and what this build has. Any thread."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, reset_process_sets
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
    """True: the engine uses Gloo's algorithms between hosts."""
    return True


def gloo_built() -> bool:
    """True: the engine uses Gloo's algorithms between hosts."""
    return True


def nccl_built() -> int:
    """The version of the NCCL in this process's torch, which sums gradients on GPUs, as in 22809; 0: it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10_000 + minor * 100 + patch)


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """False: the engine knows no GPU; tensors on GPUs are exchanged through host memory."""
    return False


def rocm_built() -> bool:
    """False: the engine knows no GPU; tensors on GPUs are exchanged through host memory."""
    return False


def sycl_built() -> bool:
    """False: the engine knows no GPU."""
    return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: object) -> None:
    """Do nothing: no part of this interface is built for one framework."""
