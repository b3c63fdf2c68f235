"""TensorFlow on elastic workers: `import spark_elastic.tensorflow as hvd` speaks Horovod's API. Knows no Spark."""

from spark_elastic.horovod.ops import horovod_names
from spark_elastic.horovod.ops.horovod_names import *
from spark_elastic.horovod.tensorflow import operations
from spark_elastic.horovod.tensorflow.operations import *
from spark_elastic.horovod.tensorflow.optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    PartialDistributedOptimizer,
)
from spark_elastic.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from spark_elastic.tensorflow import elastic
from spark_elastic.training.keras.devices import SlotGpuSelection
from spark_elastic.worker.context import get_process_context

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "elastic",
]
__all__ += horovod_names.__all__
__all__ += operations.__all__

get_process_context().get_or_create(SlotGpuSelection)
