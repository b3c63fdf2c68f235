"""One fit of the Keras estimator: what is Keras's in it. Runs in the caller's thread."""

from __future__ import annotations

import cloudpickle

from spark_elastic.estimators.checks.validation import Request
from spark_elastic.estimators.fit import fitting
from spark_elastic.estimators.fit.fit_rows import RowSource
from spark_elastic.estimators.keras_model import ElasticKerasModel, KerasPredictor
from spark_elastic.estimators.transformer import widths_of
from spark_elastic.keras.train.task import KerasTrainTask

PACKAGES = ("tensorflow", "keras")
KERAS = fitting.Framework(PACKAGES, PACKAGES, ".keras", KerasTrainTask)


def fit(rows: RowSource, request: Request) -> ElasticKerasModel:
    """Train on `rows`."""
    fitted = fitting.fit(rows, request, KERAS)
    archive = request.brought.model.with_weights(fitted.weights)
    change = request.brought.transformation
    shipped = None if change is None else cloudpickle.dumps(change)
    predictor = KerasPredictor(archive, fitted.features, shipped, request.label_cols)
    return ElasticKerasModel(predictor, fitted.summary, widths_of(predictor, fitted.sample))
