"""The pandas UDF around a `Predictor`. Apart from the model, since importing it needs pandas, and training does not.

Spark reads the UDF's kind from its annotations, so that their names must exist in this module at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd
from pyspark import Broadcast
from pyspark.sql import Column
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DataType, DoubleType

from spark_elastic.estimators.predictor import Predictor


def predict_udf(shipped: Broadcast[Predictor], width: int) -> Callable[..., Column]:
    """From the feature columns to a double, or to an array of `width` doubles where `width` is not 1."""

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        for batch in batches:
            # Spark hands a single column over as itself.
            columns = (batch,) if isinstance(batch, pd.Series) else batch
            values = shipped.value.predict(columns)
            yield pd.Series(values[:, 0] if width == 1 else list(values))

    kind: DataType = DoubleType() if width == 1 else ArrayType(DoubleType(), containsNull=False)
    return pandas_udf(predict, kind)  # type: ignore[call-overload,no-any-return]
