"""One fit of the torch estimator: what is torch's in it. Runs in the caller's thread.

The module and optimizer of the request are only read: what is trained are copies.
"""

from __future__ import annotations

import copy

import torch

from spark_elastic.estimators.checks.validation import Request
from spark_elastic.estimators.fit import fitting
from spark_elastic.estimators.fit.fit_rows import RowSource
from spark_elastic.estimators.fitted_model import ElasticTorchModel
from spark_elastic.estimators.persistence import pack
from spark_elastic.estimators.prediction.predictor import Predictor, Transformed
from spark_elastic.estimators.transformer import widths_of
from spark_elastic.torch.train.state_bytes import values_loads
from spark_elastic.torch.train.task import TorchTrainTask
from spark_elastic.torch.train.watching import check_watched

# The first step of an unpickled optimizer imports torch._dynamo: 1.5 s for which a whole world would await a joiner.
PRELOAD = ("torch", "torch._dynamo")
TORCH = fitting.Framework(("torch",), PRELOAD, ".pt", TorchTrainTask)


def fit(rows: RowSource, request: Request) -> ElasticTorchModel:
    """Train on `rows`."""
    check_watched(request.brought, request.label_cols, rows.validates(request))
    fitted = fitting.fit(rows, request, TORCH)
    module, change = trained(request, fitted.weights), request.brought.transformation
    packed = pack(module) if change is None else pack(Transformed(module, change), module)
    predictor = Predictor(packed, fitted.features)
    return ElasticTorchModel(predictor, fitted.summary, widths_of(predictor, fitted.sample))


def trained(request: Request, weights: bytes) -> torch.nn.Module:
    """A copy of the request's module with the weights that training left."""
    model: torch.nn.Module = copy.deepcopy(request.brought.model)
    model.load_state_dict(values_loads(weights))
    return model.eval()
