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

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.fitted_model import ElasticTorchModel
from spark_elastic.estimators.params import TorchParams
from spark_elastic.estimators.torch_fit import fit
from spark_elastic.estimators.validation import checked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class ElasticTorchEstimator(Estimator[ElasticTorchModel], TorchParams):  # type: ignore[misc,unused-ignore]
    """Trains a torch module on the rows of a DataFrame with workers that may come and go.

    Every parameter is a Param of Spark ML: a keyword here, `setX`/`getX`, `copy({estimator.epochs: 5})`.
    One step takes batch_size × num_workers rows, however many workers there are at that moment. The model is called
    with one tensor per feature column, the loss with the model's output and one tensor per label column.

    optimizer: over `model.parameters()`, or a function of parameters that makes one.
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
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
        loss: Callable[..., torch.Tensor] | None = None,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        output_col: str = "prediction",
        batch_size: int = 32,
        epochs: int = 1,
        num_workers: int | None = None,
        min_workers: int = 1,
        max_workers: int | None = None,
        store: str | None = None,
        seed: int = 0,
        shuffle: bool = True,
        gradient_clip_norm: float | None = None,
        gradient_clip_value: float | None = None,
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
        settings = {name: value for name, value in values.items() if not self.hasParam(name)}
        known = {field.name for field in dataclasses.fields(ElasticConfig)}
        for name in settings.keys() - known:
            raise InvalidInput(
                f"{name!r} is neither a parameter of ElasticTorchEstimator nor a field of ElasticConfig."
            )
        self._set(**{name: value for name, value in values.items() if self.hasParam(name)})
        self._set(settings={**self.getOrDefault("settings"), **settings})
        return self

    def _fit(self, dataset: DataFrame) -> ElasticTorchModel:
        request = checked({param.name: self.getOrDefault(param) for param in self.params})
        model = fit(dataset, request)
        for param in model.params:
            if self.isDefined(param.name):
                model._set(**{param.name: self.getOrDefault(param.name)})
        return model
