"""PyTorch on elastic workers: `import spark_elastic.torch as hvd` speaks Horovod's torch API. Knows no Spark."""

from elastic_collectives import CollectiveError as HorovodInternalError
from spark_elastic.errors import PreflightError as HorovodVersionMismatchError
from spark_elastic.ops.barrier import barrier
from spark_elastic.ops.channels import start_timeline, stop_timeline
from spark_elastic.ops.objects import allgather_object, broadcast_object
from spark_elastic.ops.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_process_set_included,
    remove_process_set,
)
from spark_elastic.ops.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from spark_elastic.ops.topology import (
    ccl_built,
    check_extension,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from spark_elastic.state.state import HostsUpdatedInterrupt
from spark_elastic.torch import elastic
from spark_elastic.torch.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from spark_elastic.torch.collectives import join, sparse_allreduce_async
from spark_elastic.torch.compression import Compression
from spark_elastic.torch.gathering import (
    allgather,
    allgather_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from spark_elastic.torch.handles import poll, synchronize
from spark_elastic.torch.objects import broadcast_optimizer_state, broadcast_parameters
from spark_elastic.torch.optimizer import DistributedOptimizer
from spark_elastic.torch.progress import Progress, progress
from spark_elastic.torch.row_dropout import RowDropout, draw_rows
from spark_elastic.torch.scattering import (
    alltoall,
    alltoall_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from spark_elastic.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Progress",
    "ReduceOp",
    "RowDropout",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "draw_rows",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_process_set_included",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "progress",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
