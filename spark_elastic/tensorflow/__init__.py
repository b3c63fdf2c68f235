"""TensorFlow on elastic workers: `import spark_elastic.tensorflow as hvd` speaks Horovod's API. Knows no Spark."""

from elastic_collectives import CollectiveError as HorovodInternalError
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
from spark_elastic.tensorflow import elastic
from spark_elastic.tensorflow.allreduce import allreduce, grouped_allreduce
from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.gathering import (
    allgather,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
)
from spark_elastic.tensorflow.join import join
from spark_elastic.tensorflow.objects import broadcast_global_variables, broadcast_object_fn
from spark_elastic.tensorflow.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from spark_elastic.tensorflow.scattering import alltoall, grouped_reducescatter, reducescatter
from spark_elastic.tensorflow.sync_batch_norm import SyncBatchNormalization
from spark_elastic.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from spark_elastic.tensorflow.topology_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_process_set_included",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
