"""One fit of the Keras estimator: what is Keras's in it. Runs in the caller's thread."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from spark_elastic.estimators import fitting
from spark_elastic.estimators.keras_model import ElasticKerasModel, KerasPredictor
from spark_elastic.estimators.validation import Request
from spark_elastic.keras.train_task import KerasTrainTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PACKAGES = ("tensorflow", "keras")
KERAS = fitting.Framework(PACKAGES, PACKAGES, ".keras", KerasTrainTask)


def fit(df: DataFrame, request: Request) -> ElasticKerasModel:
    """Train on `df`."""
    fitted = fitting.fit(df, request, KERAS)
    archive = dataclasses.replace(request.brought.model, content=fitted.weights)
    return ElasticKerasModel(KerasPredictor(archive, fitted.features), fitted.summary)
