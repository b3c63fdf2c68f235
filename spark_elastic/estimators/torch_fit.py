"""One fit of the torch estimator: what is torch's in it. Runs in the caller's thread.

The module and optimizer of the request are only read: what is trained are copies.
"""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING

import torch

from spark_elastic.estimators import fitting
from spark_elastic.estimators.fitted_model import ElasticTorchModel
from spark_elastic.estimators.persistence import pack
from spark_elastic.estimators.predictor import Predictor
from spark_elastic.estimators.validation import Request
from spark_elastic.torch.train_task import TorchTrainTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The first step of an unpickled optimizer imports torch._dynamo: 1.5 s for which a whole world would await a joiner.
PRELOAD = ("torch", "torch._dynamo")
TORCH = fitting.Framework(("torch",), PRELOAD, ".pt", TorchTrainTask)


def fit(df: DataFrame, request: Request) -> ElasticTorchModel:
    """Train on `df`."""
    fitted = fitting.fit(df, request, TORCH)
    return ElasticTorchModel(
        Predictor(pack(trained(request, fitted.weights)), fitted.features), fitted.summary
    )


def trained(request: Request, weights: bytes) -> torch.nn.Module:
    """A copy of the request's module with the weights that training left."""
    model: torch.nn.Module = copy.deepcopy(request.brought.model)
    model.load_state_dict(torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True))
    return model.eval()
