"""PyTorch on elastic workers: state, exchange and the estimator's training. Imports torch; knows no Spark."""

from spark_elastic.torch.exchange import GradientExchange
from spark_elastic.torch.progress import Progress, progress
from spark_elastic.torch.torch_state import TorchState

__all__ = ["GradientExchange", "Progress", "TorchState", "progress"]
