"""The fitted model: a Transformer of Spark ML around a trained torch module.

`transform` adds a column of predictions, batch by batch in Arrow. Saving follows Spark ML's layout (`metadata/`
beside `data/`), written through Spark, so that any path Spark can write will do and pipelines can hold the model.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators import saving
from spark_elastic.estimators.history import FitSummary
from spark_elastic.estimators.outputs import Outputs
from spark_elastic.estimators.params import ColumnParams
from spark_elastic.estimators.predictor import Predictor

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

_ALL = "__spark_elastic_outputs"


class ElasticTorchModel(Model, ColumnParams, MLWritable, MLReadable["ElasticTorchModel"]):  # type: ignore[misc,unused-ignore]
    """What `ElasticTorchEstimator.fit` returns.

    `transform(df)` adds `prediction_col`: a double where the module returns one number per row, else an array of
    doubles; with `probability_col` the class as a double and a vector of probabilities, as Spark's evaluators
    take them.
    A module of several outputs adds a column for each: `output_cols`, by default LABEL__output.

    `history` has a dict per epoch, `summary` tells worlds and seconds too; `history_frame()` and `worlds_frame()`
    are the same as DataFrames. `model` is a copy of the module.

    `save` keeps the weights in a form that loads without running code; the module's architecture goes through
    cloudpickle, so that `load` must be given only paths that are trusted.
    """

    def __init__(self, predictor: Predictor, summary: FitSummary) -> None:
        super().__init__()
        self._predictor = predictor
        self._summary = summary
        self._setDefault(
            prediction_col="prediction",
            probability_col=None,
            activation=None,
            output_cols=None,
            label_cols=[],
        )

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per epoch: epoch, loss, rows and what else training reported."""
        return [dict(epoch) for epoch in self._summary.epochs]

    @property
    def summary(self) -> FitSummary:
        return self._summary

    @property
    def model(self) -> torch.nn.Module:
        """A new copy of the trained module, on the CPU, in evaluation mode."""
        model: torch.nn.Module = self._predictor.packed.unpack()
        return model.eval()

    def getModel(self) -> torch.nn.Module:
        """The same as `model`."""
        return self.model

    def history_frame(self) -> DataFrame:
        """`history` as a DataFrame, a row per epoch."""
        return SparkSession.active().createDataFrame([Row(**epoch) for epoch in self.history])

    def worlds_frame(self) -> DataFrame:
        """The worlds of the training as a DataFrame: when each began, its size, and why."""
        worlds = [Row(**asdict(world)) for world in self._summary.worlds]
        return SparkSession.active().createDataFrame(worlds, "seconds double, size int, reason string")

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[ElasticTorchModel]:
        return _Reader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        inputs = [self._input(dataset, column) for column in self._predictor.columns]
        names = ("prediction_col", "probability_col", "activation", "output_cols")
        wanted = {name: self.getOrDefault(name) for name in names}
        labels = self.getOrDefault("label_cols")
        outputs = Outputs.of(self._predictor.widths(), labels=labels, **wanted)
        for name in outputs.columns:
            if name in dataset.columns:
                raise InvalidInput(
                    f"the table has a column {name!r} already: choose another name for the prediction."
                )
        from spark_elastic.estimators.predict_udf import predict_udf

        shipped = dataset.sparkSession.sparkContext.broadcast(self._predictor)
        predicted = predict_udf(shipped, outputs)(*inputs)
        if len(outputs.columns) == 1:
            return dataset.withColumn(outputs.columns[0], predicted)
        added = dataset.withColumn(_ALL, predicted)
        for name in outputs.columns:
            field = F.col(_ALL).getField(name)
            added = added.withColumn(
                name, array_to_vector(field) if name == wanted["probability_col"] else field
            )
        return added.drop(_ALL)

    @staticmethod
    def _input(dataset: DataFrame, column: Column) -> SparkColumn:
        if column.name not in dataset.columns:
            raise InvalidInput(
                f"column {column.name!r} is not in the table; it has: {', '.join(dataset.columns)}."
            )
        reference = F.col(f"`{column.name}`")
        is_vector = isinstance(dataset.schema[column.name].dataType, VectorUDT)
        return vector_to_array(reference) if is_vector else reference


class _Writer(MLWriter):
    """Metadata as Spark ML writes it, the module's parts in rows of a Parquet table."""

    def __init__(self, instance: ElasticTorchModel) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        model = self._instance
        extra = {
            "format": saving.FORMAT,
            "summary": model.summary.to_json(),
            "columns": [[c.name, c.dtype, list(c.shape)] for c in model._predictor.columns],
        }
        DefaultParamsWriter.saveMetadata(model, path, self.sc, extraMetadata=extra)
        saving.write(self.sparkSession, path, model._predictor.packed)


class _Reader(MLReader[ElasticTorchModel]):
    def __init__(self, cls: type[ElasticTorchModel]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> ElasticTorchModel:
        metadata = saving.upgraded(DefaultParamsReader.loadMetadata(path, self.sc), path)
        columns = tuple(Column(name, dtype, tuple(shape)) for name, dtype, shape in metadata["columns"])
        summary = FitSummary.from_json(metadata["summary"])
        model = self._cls(Predictor(saving.read(self.sparkSession, path), columns), summary)
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model
