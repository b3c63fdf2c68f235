"""PyTorch on elastic workers: state, exchange, optimizer, the estimator's training. Imports torch; knows no Spark."""

from spark_elastic.torch.exchange import GradientExchange
from spark_elastic.torch.optimizer import Average, DistributedOptimizer, ReduceOp, Sum
from spark_elastic.torch.progress import Progress, progress
from spark_elastic.torch.torch_state import TorchState

__all__ = [
    "Average",
    "DistributedOptimizer",
    "GradientExchange",
    "Progress",
    "ReduceOp",
    "Sum",
    "TorchState",
    "progress",
]
