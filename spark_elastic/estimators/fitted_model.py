"""The fitted model: a Transformer of Spark ML around a trained torch module.

`transform` adds a column of predictions, batch by batch in Arrow. Saving follows Spark ML's layout (`metadata/`
beside `data/`), written through Spark, so that any path Spark can write will do and pipelines can hold the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from pyspark.ml import Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import functions as F

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.history import FitSummary
from spark_elastic.estimators.params import ColumnParams
from spark_elastic.estimators.persistence import Packed
from spark_elastic.estimators.predictor import Predictor

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

CHUNK = 16 << 20  # bytes of a saved row: far below Spark's limits on one value


class ElasticTorchModel(Model, ColumnParams, MLWritable, MLReadable["ElasticTorchModel"]):  # type: ignore[misc,unused-ignore]
    """What `ElasticTorchEstimator.fit` returns.

    `transform(df)` adds `output_col`: a double where the module returns one number per row, else an array of
    doubles. `history` has a dict per epoch; `summary` tells worlds and seconds too. `model` is a copy of the module.

    `save` keeps the weights in a form that loads without running code; the module's architecture goes through
    cloudpickle, so that `load` must be given only paths that are trusted.
    """

    def __init__(self, predictor: Predictor, summary: FitSummary) -> None:
        super().__init__()
        self._predictor = predictor
        self._summary = summary
        self._setDefault(output_col="prediction")

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
        return self._predictor.packed.unpack().eval()

    def getModel(self) -> torch.nn.Module:
        """The same as `model`."""
        return self.model

    def write(self) -> MLWriter:
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[ElasticTorchModel]:
        return _Reader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        inputs = [self._input(dataset, column) for column in self._predictor.columns]
        output = self.getOrDefault("output_col")
        if output in dataset.columns:
            raise InvalidInput(f"the table has a column {output!r} already: choose another output_col.")
        from spark_elastic.estimators.predict_udf import predict_udf

        shipped = dataset.sparkSession.sparkContext.broadcast(self._predictor)
        return dataset.withColumn(output, predict_udf(shipped, self._predictor.width())(*inputs))

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
            "summary": model.summary.to_json(),
            "columns": [[c.name, c.dtype, list(c.shape)] for c in model._predictor.columns],
        }
        DefaultParamsWriter.saveMetadata(model, path, self.sc, extraMetadata=extra)
        packed = model._predictor.packed
        rows = [
            (part, number, bytearray(content[start : start + CHUNK]))
            for part, content in (("architecture", packed.architecture), ("weights", packed.weights))
            for number, start in enumerate(range(0, len(content), CHUNK))
        ]
        table = self.sparkSession.createDataFrame(rows, "part string, number int, content binary")
        table.write.parquet(os.path.join(path, "data"))


class _Reader(MLReader[ElasticTorchModel]):
    def __init__(self, cls: type[ElasticTorchModel]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> ElasticTorchModel:
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        rows = self.sparkSession.read.parquet(os.path.join(path, "data")).collect()
        parts: Mapping[str, bytes] = {
            part: b"".join(bytes(r.content) for r in sorted(rows, key=lambda r: r.number) if r.part == part)
            for part in ("architecture", "weights")
        }
        columns = tuple(Column(name, dtype, tuple(shape)) for name, dtype, shape in metadata["columns"])
        summary = FitSummary.from_json(metadata["summary"])
        model = self._cls(Predictor(Packed(**parts), columns), summary)
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model
