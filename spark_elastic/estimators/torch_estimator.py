"""`ElasticTorchEstimator`, the estimator of Spark ML for torch modules.

Its parameters are in `params.py`, the fitted model is in `torch_model.py`; what a fit does is in `fitting.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pyspark.ml.util import MLReadable

from spark_elastic.estimators.elastic_estimator import ElasticEstimator
from spark_elastic.estimators.fit_rows import RowSource
from spark_elastic.estimators.fitting import Framework, train_model
from spark_elastic.estimators.params import TorchParams, with_horovod_names
from spark_elastic.estimators.predictor import ModuleWithTransformation, TorchPredictor
from spark_elastic.estimators.saving import Packed, pack
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.torch_objects import check_on_two_rows, check_torch_objects
from spark_elastic.estimators.transformer import try_shapes
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.gradients.module_state import ModelStateHandler
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.state import load_values
from spark_elastic.training.torch.trainer import TorchTrainProgram, check_watched


def _build_program(spec: TrainSpec, objects: TorchUserObjects) -> TorchTrainProgram:
    check_on_two_rows(objects, spec)
    return TorchTrainProgram(spec, objects)


# A spare imports torch._dynamo in advance: the first step of an unpickled optimizer does, which takes 1.5 s.
PRELOAD = ("torch", TorchTrainProgram.__module__, "torch._dynamo")
TORCH = Framework(("torch",), PRELOAD, ".pt", _build_program)


def fit_torch(rows: RowSource, request: FitRequest[TorchUserObjects]) -> ElasticTorchModel:
    """Train on `rows`; the request's module and optimizer are only read."""
    objects = request.objects
    check_watched(objects, request.config.data.label_cols, rows.has_validation(request))
    result = train_model(rows, request, TORCH)
    module = load_trained_module(objects.model, result.weights)
    change = objects.transformation
    thing = module if change is None else ModuleWithTransformation(module, change)
    predictor = TorchPredictor(pack(thing, module), result.features)
    return ElasticTorchModel(predictor, result.summary, try_shapes(predictor, result.sample))


def load_trained_module(model: torch.nn.Module, weights: bytes) -> torch.nn.Module:
    """A copy of the model as training left it, also in its buffers, in evaluation mode."""
    module = copy.deepcopy(model)
    ModelStateHandler(module).load(load_values(weights), np.empty(0, np.uint8))
    return module.eval()


@with_horovod_names
class ElasticTorchEstimator(  # type: ignore[misc,unused-ignore]
    ElasticEstimator, TorchParams, MLReadable["ElasticTorchEstimator"]
):
    """Trains a torch module on the rows of a DataFrame with workers that may come and go.

    Every parameter is a Param of Spark ML: a keyword here, `setX`/`getX`, `copy({estimator.epochs: 5})`.
    One step takes batch_size × num_workers rows, however many workers there are at that moment. The model is called
    with one tensor per feature column, the loss with the model's output and one tensor per label column.

    optimizer: over `model.parameters()`, or a function that makes one from parameters. A LightningModule has its own,
    and its own loss: see docs/estimators.md. Horovod's names are accepted, or refused with what to use instead.
    store: shared by driver and executors; optional if all of them run on this machine.
    config, or any field of `ElasticConfig` as a keyword: ports, addresses, time limits, ledger.

    `fit` raises InvalidInput if an argument or a column is wrong: before any Spark job where the schema shows it, else
    after the rows were written or their footers read; PreflightError if a host cannot take part; JobFailed and its
    subclasses; JobCancelled; StoreError.
    """

    _check_objects, _train = staticmethod(check_torch_objects), staticmethod(fit_torch)

    def _pack_objects(self, objects: Mapping[str, Any]) -> dict[str, bytes]:
        model = self.getOrDefault("model")
        return pack(dict(objects), model if isinstance(model, torch.nn.Module) else None).parts()

    def _unpack_objects(self, parts: Mapping[str, bytes]) -> dict[str, Any]:
        objects: dict[str, Any] = Packed(**parts).unpack()
        return objects
