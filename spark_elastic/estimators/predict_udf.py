"""The pandas UDF around a trained model. Apart from the model, since importing it needs pandas, and training does not.

Spark reads the UDF's kind from its annotations, so that their names must exist in this module at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from weakref import finalize, ref

import cloudpickle
import numpy as np
import pandas as pd
from pyspark import TaskContext
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DataType, DoubleType, StructField, StructType

from spark_elastic.estimators.predictor import Outputs, Predictor, as_column
from spark_elastic.spark.payload import Payload, make_payload
from spark_elastic.spark.session import has_context


class ShippedPredictor(Protocol):
    """A predictor as a task has it."""

    @property
    def value(self) -> Predictor: ...


@dataclass(frozen=True)
class PickledPredictor:
    """For where there are no broadcasts."""

    content: Payload  # of cloudpickle

    @cached_property
    def value(self) -> Predictor:
        found: Predictor = cloudpickle.loads(self.content.value)
        return found


# By the id of a predictor, which never changes: its broadcast, and whose it is. Spark keeps each in a file of the
# driver until the session ends, so that each `transform` must not make another one.
_broadcasts: dict[int, tuple[ref[Any], ShippedPredictor]] = {}


def ship_predictor(spark: SparkSession, predictor: Predictor) -> ShippedPredictor:
    """`predictor`, to be used inside of tasks."""
    if not has_context(spark):
        return PickledPredictor(make_payload(spark, cloudpickle.dumps(predictor)))
    sc = spark.sparkContext
    known = _broadcasts.get(id(predictor))
    if known is None or known[0]() is not sc:
        known = _broadcasts[id(predictor)] = ref(sc), sc.broadcast(predictor)
        finalize(predictor, _broadcasts.pop, id(predictor), None)
    return known[1]


def predict_udf(shipped: ShippedPredictor, outputs: Outputs) -> Callable[..., Column]:
    """From the feature columns to the one column of `outputs`, or to a struct of all, in fields of their names."""

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        for batch in batches:
            yield pd.Series(as_column(_values(shipped, outputs, batch)[0]))

    def predict_all(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            values = _values(shipped, outputs, batch)
            columns = {n: as_column(v) for n, v in zip(outputs.columns, values, strict=True)}
            yield pd.DataFrame(columns)

    kinds = [_choose_type(width) for width in outputs.widths]
    if len(kinds) == 1:
        return pandas_udf(predict, kinds[0])  # type: ignore[call-overload,no-any-return]
    fields = [StructField(name, kind) for name, kind in zip(outputs.columns, kinds, strict=True)]
    return pandas_udf(predict_all, StructType(fields))  # type: ignore[call-overload,no-any-return]


def _values(shipped: ShippedPredictor, outputs: Outputs, batch: Any) -> list[Any]:
    # Spark hands a single column over as itself.
    columns = (batch,) if isinstance(batch, pd.Series) else batch
    if not len(columns[0]):
        return [np.zeros((0, width)) for width in outputs.widths]
    task = TaskContext.get()
    gpu = None if task is None else task.resources().get("gpu")
    return list(outputs.values(shipped.value.predict(columns, () if gpu is None else gpu.addresses)))


def _choose_type(width: int) -> DataType:
    return DoubleType() if width == 1 else ArrayType(DoubleType(), containsNull=True)


def restore_nan(predicted: Column, width: int) -> Column:
    """A column of `predict_udf` with NaN where the model gave it: pandas' way to Arrow makes a null of it."""
    nan = F.lit(float("nan"))
    return (
        F.coalesce(predicted, nan)
        if width == 1
        else F.transform(predicted, lambda each: F.coalesce(each, nan))
    )
