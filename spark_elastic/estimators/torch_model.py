"""`ElasticTorchModel`, the fitted model of the torch estimator.

A file of its own: loading a model and predicting with it import neither the engine nor the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml.util import MLReadable

from spark_elastic.data.manifest import Column
from spark_elastic.estimators.predictor import TorchPredictor
from spark_elastic.estimators.saving import Packed
from spark_elastic.estimators.transformer import ElasticModel


class ElasticTorchModel(ElasticModel, MLReadable["ElasticTorchModel"]):  # type: ignore[misc,unused-ignore]
    """What `ElasticTorchEstimator.fit` returns.

    With a loss of classes `transform(df)` adds the columns of Spark ML's classifiers: the class as a double, a vector
    of probabilities and one of what these are made of. Else it adds `prediction_col`: a double where the module returns
    one number per row, else an array of doubles.
    The estimator's transformation_fn is applied here, too; it is given the feature columns alone.
    A module of several outputs adds a column for each: `output_cols`, by default LABEL__output.

    `history` has a dict per epoch, `summary` tells worlds and seconds too; `history_frame()` and `worlds_frame()`
    are the same as DataFrames. `model` is a copy of the module, on the CPU, in evaluation mode.

    `save` keeps the weights in a form that loads without running code; the module's architecture goes through
    cloudpickle, so that `load` must be given only paths that are trusted.
    """

    @classmethod
    def _restore_predictor(
        cls, parts: Mapping[str, bytes], columns: tuple[Column, ...], extra: Mapping[str, Any]
    ) -> TorchPredictor:
        return TorchPredictor(Packed(**parts), columns)
