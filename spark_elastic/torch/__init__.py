"""PyTorch on elastic workers: `import spark_elastic.torch as hvd` speaks Horovod's torch API. Knows no Spark."""

from spark_elastic.errors import PreflightError as HorovodVersionMismatchError
from spark_elastic.gradients.determinism import RowDropout, draw_rows
from spark_elastic.gradients.devices import SlotGpuSelection
from spark_elastic.horovod.ops import horovod_names
from spark_elastic.horovod.ops.horovod_names import *
from spark_elastic.horovod.ops.operations import allgather_object, broadcast_object
from spark_elastic.horovod.torch import operations
from spark_elastic.horovod.torch.layers import SyncBatchNorm
from spark_elastic.horovod.torch.operations import *
from spark_elastic.horovod.torch.optimizer import DistributedOptimizer
from spark_elastic.torch import elastic
from spark_elastic.training.torch.callbacks import Progress, progress
from spark_elastic.worker.context import get_process_context

__all__ = [
    "DistributedOptimizer",
    "HorovodVersionMismatchError",
    "Progress",
    "RowDropout",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "draw_rows",
    "elastic",
    "progress",
]
__all__ += horovod_names.__all__
__all__ += operations.__all__

get_process_context().get_or_create(SlotGpuSelection)
