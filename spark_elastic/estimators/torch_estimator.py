"""`ElasticTorchEstimator`: the estimator of Spark ML for torch modules.

Owns its keywords and their defaults. What values are allowed is `validation.py`'s, what a fit does `torch_fit.py`'s.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pyspark import keyword_only
from pyspark.ml import Estimator
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators import saving
from spark_elastic.estimators.fitted_model import ElasticTorchModel
from spark_elastic.estimators.horovod_names import translated, with_horovod_names
from spark_elastic.estimators.objects import activation_of, brought
from spark_elastic.estimators.params import TorchParams
from spark_elastic.estimators.persistence import Packed, pack
from spark_elastic.estimators.torch_fit import fit
from spark_elastic.estimators.validation import checked
from spark_elastic.torch.callbacks import Callback

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@with_horovod_names
class ElasticTorchEstimator(  # type: ignore[misc,unused-ignore]
    Estimator[ElasticTorchModel], TorchParams, MLWritable, MLReadable["ElasticTorchEstimator"]
):
    """Trains a torch module on the rows of a DataFrame with workers that may come and go.

    Every parameter is a Param of Spark ML: a keyword here, `setX`/`getX`, `copy({estimator.epochs: 5})`.
    One step takes batch_size × num_workers rows, however many workers there are at that moment. The model is called
    with one tensor per feature column, the loss with the model's output and one tensor per label column.

    optimizer: over `model.parameters()`, or a function of parameters that makes one. A LightningModule brings its own,
    and its loss: see `spark_elastic.torch.objective`. Horovod's names are taken, or refused with what to use instead.
    store: shared by driver and executors; where all run on this machine it may be left out.
    config, or any field of `ElasticConfig` as a keyword of its own: ports, addresses, time limits, ledger.

    `fit` raises InvalidInput for what is wrong with an argument or a column before any Spark job, PreflightError for
    a host that cannot take part, JobFailed and its subclasses, JobCancelled, StoreError.
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
        keywords = inspect.signature(type(self).__init__).parameters.values()
        self._setDefault(settings={}, **{k.name: k.default for k in keywords if k.kind is k.KEYWORD_ONLY})
        self.setParams(**self._input_kwargs)

    def setParams(self, **values: Any) -> ElasticTorchEstimator:
        """Set parameters, and fields of `ElasticConfig`, by name; those not named stay."""
        values = translated(values)
        settings = {name: value for name, value in values.items() if not self.hasParam(name)}
        known = {field.name for field in dataclasses.fields(ElasticConfig)}
        for name in settings.keys() - known:
            raise InvalidInput(
                f"{name!r} is neither a parameter of ElasticTorchEstimator nor a field of ElasticConfig."
            )
        self._set(**{name: value for name, value in values.items() if self.hasParam(name)})
        self._set(settings={**self.getOrDefault("settings"), **settings})
        return self

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[ElasticTorchEstimator]:
        return _Reader(cls)

    def _fit(self, dataset: DataFrame) -> ElasticTorchModel:
        values = {param.name: self.getOrDefault(param) for param in self.params}
        model = fit(dataset, checked(values, brought))
        for param in model.params:
            if self.isDefined(param.name):
                model._set(**{param.name: self.getOrDefault(param.name)})
        if values["activation"] is None:
            model._set(activation=activation_of(values["loss"]))
        return model


class _Writer(MLWriter):
    """Plain parameters as Spark ML writes them, the others packed together: what they share stays shared."""

    def __init__(self, instance: ElasticTorchEstimator) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        estimator = self._instance
        values = {param.name: value for param, value in estimator._paramMap.items()}
        objects = {name: value for name, value in values.items() if not _is_plain(value)}
        plain = {name: value for name, value in values.items() if name not in objects}
        extra = {"format": saving.FORMAT}
        DefaultParamsWriter.saveMetadata(estimator, path, self.sc, extraMetadata=extra, paramMap=plain)
        model = values.get("model")
        named = model if isinstance(model, torch.nn.Module) else None
        saving.write(self.sparkSession, path, pack(objects, named).parts())


class _Reader(MLReader["ElasticTorchEstimator"]):
    def __init__(self, cls: type[ElasticTorchEstimator]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> ElasticTorchEstimator:
        metadata = saving.upgraded(DefaultParamsReader.loadMetadata(path, self.sc), path)
        estimator = self._cls()
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata, skipParams=["settings"])
        estimator._set(**{**metadata["paramMap"], **Packed(**saving.read(self.sparkSession, path)).unpack()})
        return estimator


def _is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
