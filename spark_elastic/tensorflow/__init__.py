"""TensorFlow on elastic workers: `import spark_elastic.tensorflow as hvd` speaks Horovod's API. Knows no Spark."""

from spark_elastic.horovod.ops import horovod_names
from spark_elastic.horovod.ops.horovod_names import *
from spark_elastic.horovod.tensorflow import elastic, gathering
from spark_elastic.horovod.tensorflow.allreduce import allreduce, grouped_allreduce
from spark_elastic.horovod.tensorflow.gathering import *
from spark_elastic.horovod.tensorflow.optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    PartialDistributedOptimizer,
)
from spark_elastic.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from spark_elastic.training.keras.devices import SlotGpuSelection
from spark_elastic.worker.context import get_process_context

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allreduce",
    "elastic",
    "grouped_allreduce",
]
__all__ += horovod_names.__all__
__all__ += gathering.__all__

get_process_context().get_or_create(SlotGpuSelection)
