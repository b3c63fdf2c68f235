"""Horovod's names that are the same for every framework; `spark_elastic.torch`, `.tensorflow` and `.keras` export them.

Each framework's own names are in its package.
"""

from elastic_collectives import CollectiveError as HorovodInternalError
from spark_elastic.gradients.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from spark_elastic.gradients.ranks import (
    cross_rank,
    cross_size,
    is_homogeneous,
    local_rank,
    local_size,
    rank,
    size,
)
from spark_elastic.gradients.reduction import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from spark_elastic.gradients.timeline import start_timeline, stop_timeline
from spark_elastic.handwritten.object_state import HostsUpdatedInterrupt
from spark_elastic.horovod.ops.topology import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
    sycl_built,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
]
