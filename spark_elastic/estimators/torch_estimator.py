"""`ElasticTorchEstimator`: the estimator of Spark ML for torch modules.

Owns its keywords and their defaults. What values are allowed is `validation.py`'s, what a fit does `torch_fit.py`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyspark import keyword_only
from pyspark.ml.util import MLReadable, MLReader

from spark_elastic.config import ElasticConfig
from spark_elastic.data.manifest import Column
from spark_elastic.estimators import fitting
from spark_elastic.estimators.elastic_estimator import ElasticEstimator, EstimatorReader
from spark_elastic.estimators.fit_rows import RowSource
from spark_elastic.estimators.params import TorchParams, with_horovod_names
from spark_elastic.estimators.predictor import ModuleWithTransformation, TorchPredictor
from spark_elastic.estimators.saving import Packed, pack
from spark_elastic.estimators.torch_objects import activation_of, check_torch_objects
from spark_elastic.estimators.transformer import ElasticModel, ModelReader, try_widths
from spark_elastic.estimators.validation import FitRequest, build_request
from spark_elastic.torch.callbacks import Callback
from spark_elastic.torch.train.state import values_loads
from spark_elastic.torch.train.task import TorchTrainTask, check_watched

# The fitted model of the torch estimator. What all frameworks' models can do is `transformer.py`'s.


class ElasticTorchModel(ElasticModel, MLReadable["ElasticTorchModel"]):  # type: ignore[misc,unused-ignore]
    """What `ElasticTorchEstimator.fit` returns.

    `transform(df)` adds `prediction_col`: a double where the module returns one number per row, else an array of
    doubles; with `probability_col` the class as a double and a vector of probabilities, as Spark's evaluators
    take them.
    The estimator's transformation_fn is applied here, too; it is given the feature columns alone.
    A module of several outputs adds a column for each: `output_cols`, by default LABEL__output.

    `history` has a dict per epoch, `summary` tells worlds and seconds too; `history_frame()` and `worlds_frame()`
    are the same as DataFrames. `model` is a copy of the module, on the CPU, in evaluation mode.

    `save` keeps the weights in a form that loads without running code; the module's architecture goes through
    cloudpickle, so that `load` must be given only paths that are trusted.
    """

    @classmethod
    def read(cls) -> MLReader[ElasticTorchModel]:
        return ModelReader(cls)

    @classmethod
    def _restore_predictor(
        cls, parts: Mapping[str, bytes], columns: tuple[Column, ...], extra: Mapping[str, Any]
    ) -> TorchPredictor:
        return TorchPredictor(Packed(**parts), columns)


# One fit of the torch estimator: what is torch's in it. Runs in the caller's thread.
#
# The module and optimizer of the request are only read: what is trained are copies.


# The first step of an unpickled optimizer imports torch._dynamo: 1.5 s for which a whole world would await a joiner.
PRELOAD = ("torch", "torch._dynamo")
TORCH = fitting.Framework(("torch",), PRELOAD, ".pt", TorchTrainTask)


def fit(rows: RowSource, request: FitRequest) -> ElasticTorchModel:
    """Train on `rows`."""
    check_watched(request.brought, request.label_cols, rows.has_validation(request))
    fitted = fitting.fit(rows, request, TORCH)
    module, change = trained(request, fitted.weights), request.brought.transformation
    packed = pack(module) if change is None else pack(ModuleWithTransformation(module, change), module)
    predictor = TorchPredictor(packed, fitted.features)
    return ElasticTorchModel(predictor, fitted.summary, try_widths(predictor, fitted.sample))


def trained(request: FitRequest, weights: bytes) -> torch.nn.Module:
    """A copy of the request's module with the weights that training left."""
    model: torch.nn.Module = copy.deepcopy(request.brought.model)
    model.load_state_dict(values_loads(weights))
    return model.eval()


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

    `fit` raises InvalidInput if an argument or a column is wrong, before any Spark job; PreflightError if a host cannot
    take part; JobFailed and its subclasses; JobCancelled; StoreError.
    """

    _input_kwargs: dict[str, Any]

    @keyword_only
    def __init__(  # noqa: PLR0913 - the keywords are the Params
        self,
        *,
        model: torch.nn.Module | Callable[[], torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
        learning_rate: float | None = None,
        scale_lr: bool = False,
        loss: Callable[..., torch.Tensor] | Sequence[Callable[..., torch.Tensor]] | None = None,
        loss_weights: Sequence[float] | None = None,
        metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
        train_minibatch_fn: Callable[..., torch.Tensor] | None = None,
        transformation_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        prediction_col: str = "prediction",
        probability_col: str | None = None,
        activation: str | None = None,
        output_cols: Sequence[str] | None = None,
        validation: float | str | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        backward_passes_per_step: int = 1,
        epochs: int = 1,
        num_workers: int | None = None,
        min_workers: int = 1,
        max_workers: int | None = None,
        store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        missing: str | Mapping[str, str] = "refuse",
        seed: int = 0,
        shuffle: bool = True,
        gradient_clip_norm: float | None = None,
        gradient_clip_value: float | None = None,
        precision: str | None = None,
        gradient_compression: str | None = None,
        reader: str = "arrow",
        terminate_on_nan: bool = False,
        inmemory_cache_all: bool = False,
        run_id: str | None = None,
        verbose: int = 1,
        keep_data: bool = False,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
        config: ElasticConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._set_given(self._input_kwargs)

    @classmethod
    def read(cls) -> MLReader[ElasticTorchEstimator]:
        return EstimatorReader(cls)

    def _fit_rows(self, rows: RowSource) -> ElasticTorchModel:
        model = fit(rows, build_request(self._values, check_torch_objects))
        self._copy_params_to(model, activation_of(self.getOrDefault("loss")))
        return model

    def _pack_objects(self, objects: Mapping[str, Any]) -> dict[str, bytes]:
        model = self.getOrDefault("model")
        return pack(dict(objects), model if isinstance(model, torch.nn.Module) else None).parts()

    def _unpack_objects(self, parts: Mapping[str, bytes]) -> dict[str, Any]:
        objects: dict[str, Any] = Packed(**parts).unpack()
        return objects
