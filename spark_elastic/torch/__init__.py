"""PyTorch on elastic workers: `import spark_elastic.torch as hvd` speaks Horovod's torch API. Knows no Spark."""

from elastic_collectives import CollectiveError as HorovodInternalError
from spark_elastic.state.state import HostsUpdatedInterrupt
from spark_elastic.torch import elastic
from spark_elastic.torch.collectives import allgather, allreduce, barrier, broadcast, broadcast_
from spark_elastic.torch.compression import Compression
from spark_elastic.torch.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from spark_elastic.torch.optimizer import DistributedOptimizer
from spark_elastic.torch.progress import Progress, progress
from spark_elastic.torch.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from spark_elastic.torch.topology import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "Product",
    "Progress",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "progress",
    "rank",
    "shutdown",
    "size",
]
