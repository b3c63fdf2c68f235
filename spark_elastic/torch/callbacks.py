"""Callbacks of estimators and of hand-written training: the public name of `training.torch.callbacks`."""

from spark_elastic.training.torch.callbacks import *
from spark_elastic.training.torch.callbacks import __all__ as __all__
