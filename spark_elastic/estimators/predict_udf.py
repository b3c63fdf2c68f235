"""The pandas UDF around a trained model. Apart from the model, since importing it needs pandas, and training does not.

Spark reads the UDF's kind from its annotations, so that their names must exist in this module at run time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import cloudpickle
import numpy as np
import numpy.typing as npt
import pandas as pd
from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

from spark_elastic.clusters.spark.host_facts import has_context
from spark_elastic.clusters.spark.payload import Payload, make_payload
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframes.scan import MissingKind, MissingValues, format_left_out
from spark_elastic.estimators.outputs import Outputs, as_column
from spark_elastic.estimators.predictor import Predictor

if TYPE_CHECKING:
    from pyspark import Broadcast

log = logging.getLogger("spark_elastic")


@dataclass(frozen=True)
class PickledPredictor:
    """For where there are no broadcasts."""

    content: Payload  # of cloudpickle

    @cached_property
    def value(self) -> Predictor:
        found: Predictor = cloudpickle.loads(self.content.value)
        return found


Shipped: TypeAlias = "Broadcast[Predictor] | PickledPredictor"  # a predictor as a task has it


def ship_predictor(spark: SparkSession, predictor: Predictor) -> Shipped:
    """`predictor`, to be used inside of tasks. It keeps its broadcast: Spark keeps a file for each until the session
    ends, so that each `transform` must not make another one."""
    if not has_context(spark):
        return PickledPredictor(make_payload(spark, cloudpickle.dumps(predictor)))
    sc, kept = spark.sparkContext, vars(predictor)
    if "_shipped" not in kept or kept["_shipped"][0]() is not sc:
        kept["_shipped"] = ref(sc), sc.broadcast(predictor)
    shipped: Broadcast[Predictor] = kept["_shipped"][1]
    return shipped


class _LogOnDriver(AccumulatorParam[str]):
    """Logs on the driver what a task adds, once the task has ended."""

    def zero(self, value: str) -> str:
        return value

    def addInPlace(self, value1: str, value2: str) -> str:
        if value2 and TaskContext.get() is None:
            log.warning(value2)
        return value2


@dataclass(frozen=True)
class MissingRows:
    """What happens to rows with missing values."""

    kinds: tuple[MissingKind, ...]  # by the number in the UDF's last column; -1 there: nothing is missing
    drops: tuple[bool, ...]  # whether rows of each kind are left out; else they end the job
    driver_log: Accumulator[str] | None = None  # takes a task's line of the log; None: it logs itself

    @classmethod
    def of(cls, spark: SparkSession, kinds: Iterable[MissingKind], missing: MissingValues) -> MissingRows:
        found = tuple(kinds)
        drops = tuple((missing.nulls if kind.what == "nulls" else missing.nans) == "drop" for kind in found)
        logs = any(drops) and has_context(spark)
        return cls(found, drops, spark.sparkContext.accumulator("", _LogOnDriver()) if logs else None)

    def check(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows are to be predicted. Raises InvalidInput for missing values that are refused."""
        for number in np.unique(numbers[numbers >= 0]):
            if not self.drops[number]:
                count = int((numbers == number).sum())
                raise InvalidInput(self.kinds[number].describe(count, f"{len(numbers)} rows of a batch"))
        found: npt.NDArray[np.bool_] = numbers < 0
        return found

    def log(self, counts: Counter[int]) -> None:
        """Log what a task left out. counts: of its rows, by number."""
        reasons = {self.kinds[number]: count for number, count in sorted(counts.items()) if number >= 0}
        if reasons:
            line = f"transform {format_left_out(sum(reasons.values()), counts.total(), reasons)} of a task"
            log.warning(line) if self.driver_log is None else self.driver_log.add(line)


def predict_udf(shipped: Shipped, outputs: Outputs, rows: MissingRows) -> Callable[..., Column]:
    """From the feature columns, and the number of what a row lacks, to a struct of `outputs`, in fields of their names.
    What is left out has nulls."""

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        for values in _predict(shipped, outputs, rows, batches):
            yield pd.DataFrame({n: as_column(v) for n, v in zip(outputs.columns, values, strict=True)})

    number, numbers = DoubleType(), ArrayType(DoubleType(), containsNull=True)
    kinds = zip(outputs.columns, outputs.widths, strict=True)
    fields = [StructField(name, number if width == 1 else numbers) for name, width in kinds]
    made: Any = pandas_udf(predict, StructType(fields))  # type: ignore[call-overload]
    # Else Spark would filter the rows before they are counted here.
    return made.asNondeterministic() if any(rows.drops) else made  # type: ignore[no-any-return]


def _predict(
    shipped: Shipped, outputs: Outputs, rows: MissingRows, batches: Iterator[tuple[pd.Series, ...]]
) -> Iterator[list[Any]]:
    counts: Counter[int] = Counter()
    task = TaskContext.get()
    gpu = None if task is None else task.resources().get("gpu")
    addresses = () if gpu is None else gpu.addresses
    for *columns, series in batches:
        numbers = series.to_numpy()
        kept = rows.check(numbers)
        counts.update(numbers[~kept].tolist())
        counts[-1] += int(kept.sum())
        if len(kept) and kept.all():
            yield outputs.values(shipped.value.predict(columns, addresses))
            continue
        values = [np.full((len(kept), width), np.nan) for width in outputs.widths]
        if kept.any():
            predicted = shipped.value.predict([column[kept] for column in columns], addresses)
            for whole, part in zip(values, outputs.values(predicted), strict=True):
                whole[kept] = part
        yield values
    rows.log(counts)


def restore_nan(predicted: Column, width: int) -> Column:
    """A column of `predict_udf` with NaN where the model gave it: pandas' way to Arrow makes a null of it."""
    nan = F.lit(float("nan"))
    if width == 1:
        return F.coalesce(predicted, nan)
    return F.transform(predicted, lambda each: F.coalesce(each, nan))
