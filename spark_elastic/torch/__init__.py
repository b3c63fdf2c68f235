"""PyTorch on elastic workers: `import spark_elastic.torch as hvd` speaks Horovod's torch API. Knows no Spark."""

from spark_elastic.errors import PreflightError as HorovodVersionMismatchError
from spark_elastic.gradients.devices import SlotGpuSelection
from spark_elastic.gradients.process_sets import get_process_set_ids_and_ranks, is_process_set_included
from spark_elastic.horovod.ops import horovod_names
from spark_elastic.horovod.ops.compression import Compression
from spark_elastic.horovod.ops.horovod_names import *
from spark_elastic.horovod.ops.horovod_names import check_extension
from spark_elastic.horovod.ops.operations import allgather_object, barrier, broadcast_object
from spark_elastic.horovod.torch.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from spark_elastic.horovod.torch.gathering import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_optimizer_state,
    broadcast_parameters,
    gather_rows,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from spark_elastic.horovod.torch.layers import SyncBatchNorm
from spark_elastic.horovod.torch.optimizer import DistributedOptimizer
from spark_elastic.torch import elastic
from spark_elastic.training.torch.callbacks import Progress, progress
from spark_elastic.training.torch.determinism import RowDropout, draw_rows
from spark_elastic.worker.context import get_process_context

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodVersionMismatchError",
    "Progress",
    "RowDropout",
    "SyncBatchNorm",
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
    "check_extension",
    "draw_rows",
    "elastic",
    "gather_rows",
    "get_process_set_ids_and_ranks",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "is_process_set_included",
    "join",
    "poll",
    "progress",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += horovod_names.__all__

get_process_context().get_or_create(SlotGpuSelection)
