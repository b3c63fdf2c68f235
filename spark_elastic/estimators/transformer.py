"""The fitted model: a Transformer of Spark ML around a trained model of any framework."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.util import DefaultParamsReader
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DateType, TimestampNTZType, TimestampType

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframes.scan import (
    MissingValues,
    convert_column,
    find_first,
    get_column,
    list_missing,
    list_missing_in_vectors,
    quote,
)
from spark_elastic.estimators.dataframes.schema import (
    ColumnType,
    check_distinct_names,
    check_is_dataframe,
    find_column_type,
    get_name_folding,
    get_type,
)
from spark_elastic.estimators.outputs import HALF, Outputs, Shape
from spark_elastic.estimators.params import ColumnParams
from spark_elastic.estimators.predictor import Predictor
from spark_elastic.estimators.saving import Savable
from spark_elastic.monitoring.report import JobReport


@dataclass(frozen=True)
class WorldRecord:
    """A world of a fit."""

    seconds: float  # when it began, since training was launched
    size: int  # workers
    reason: str  # why it was formed, in words


@dataclass(frozen=True)
class FitSummary:
    """What a fit did."""

    run_id: str = ""  # the run's name in the store
    epochs: tuple[Mapping[str, Any], ...] = ()  # one dict per epoch, with at least `epoch`, `loss` and `rows`
    worlds: tuple[WorldRecord, ...] = ()  # in the order in which they began
    seconds: float = 0.0  # that the whole of `fit` took
    data_rows: int = 0  # rows of the training table
    digest: str = ""  # checksum of the final weights
    data: str = ""  # which rows were trained on, such as the version of a table
    data_digest: str = ""  # checksum of what they were read from
    report: JobReport = field(default_factory=JobReport)  # of the last `fit` of the run alone

    @property
    def rows_per_epoch(self) -> list[int]:
        """Rows trained in each epoch."""
        return [int(epoch["rows"]) for epoch in self.epochs]

    def to_json(self) -> str:
        fields = asdict(replace(self, report=JobReport()))
        return json.dumps({**fields, "report": json.loads(self.report.to_json())})

    @classmethod
    def from_json(cls, text: str) -> FitSummary:
        fields = json.loads(text)
        worlds = tuple(WorldRecord(**world) for world in fields.pop("worlds"))
        report = JobReport.from_json(json.dumps(fields.pop("report")))
        return cls(epochs=tuple(fields.pop("epochs")), worlds=worlds, report=report, **fields)


log = logging.getLogger("spark_elastic")

_ALL = "__spark_elastic_outputs"


class ElasticModel(Savable, Model, ColumnParams):  # type: ignore[misc,unused-ignore]
    """What an estimator's `fit` returns, whatever the framework; `_restore_predictor` is the framework's."""

    def __init__(self, predictor: Predictor, summary: FitSummary, shapes: list[Shape] | None = None) -> None:
        """shapes: of a row of each output, where they were tried already."""
        super().__init__()
        self._known_shapes = shapes
        self._predictor = predictor
        self._summary = summary
        columns = {"prediction_col": "prediction", "probability_col": "probability", "label_cols": []}
        self._setDefault(**columns, raw_prediction_col="rawPrediction", output_cols=None, raw_outputs=False)
        self._setDefault(activation=None, threshold=HALF, thresholds=None, missing="refuse")

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per epoch: epoch, loss, rows and what else training reported."""
        return [dict(epoch) for epoch in self._summary.epochs]

    def getHistory(self) -> dict[str, list[Any]]:
        """`history` by name: a list of each number's values, an epoch each; None where an epoch has it not."""
        names = dict.fromkeys(name for epoch in self.history for name in epoch)
        return {name: [epoch.get(name) for epoch in self.history] for name in names}

    @property
    def summary(self) -> FitSummary:
        return self._summary

    @property
    def model(self) -> Any:
        """A new copy of the trained model."""
        return self._predictor.model()

    def getModel(self) -> Any:
        """The same as `model`."""
        return self.model

    def history_frame(self) -> DataFrame:
        """`history` as a DataFrame, a row per epoch."""
        columns = self.getHistory()  # epochs need not have the same numbers
        rows = list(zip(*map(_widen, columns.values()), strict=True))
        return SparkSession.active().createDataFrame(rows, list(columns))

    def worlds_frame(self) -> DataFrame:
        """The worlds of the training as a DataFrame: when each began, its size, and why."""
        worlds = [Row(**asdict(world)) for world in self._summary.worlds]
        return SparkSession.active().createDataFrame(worlds, "seconds double, size int, reason string")

    def list_saved(self) -> tuple[dict[str, Any], None, Mapping[str, bytes]]:
        """Metadata, Spark ML's own parameters (None: all), and parts."""
        columns = [[c.name, c.dtype, list(c.shape), c.ragged] for c in self._predictor.columns]
        known = {"summary": self.summary.to_json(), "columns": columns, "shapes": self._known_shapes}
        return {**known, **self._extra()}, None, self._predictor.parts()

    @classmethod
    def load_saved(cls, metadata: dict[str, Any], parts: Mapping[str, bytes]) -> Any:
        given = metadata["columns"]
        columns = tuple(Column(name, dtype, tuple(shape), "", ragged) for name, dtype, shape, ragged in given)
        shapes = metadata["shapes"]  # none: not tried
        predictor = cls._restore_predictor(parts, columns, metadata)
        summary = FitSummary.from_json(metadata["summary"])
        model: Any = cls(predictor, summary, None if shapes is None else list(map(tuple, shapes)))
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model

    @classmethod
    def _restore_predictor(
        cls, parts: Mapping[str, bytes], columns: tuple[Column, ...], extra: Mapping[str, Any]
    ) -> Predictor:
        """What was saved. extra: of `_extra`."""
        raise TypeError(f"{cls.__name__} belongs to no framework")

    def _extra(self) -> dict[str, Any]:
        """What the framework adds to the metadata."""
        return {}

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_is_dataframe(dataset, "transform")
        wanted = self.find_output_columns()
        # Before `_find_shapes`, which may run a job.
        _check_new(dataset, wanted.list_certain())
        inputs = self._find_inputs(dataset)
        missing = MissingValues.parse(self.getOrDefault("missing"))
        types = {name: find_column_type(dataset.schema, name, transformed=True) for name, _ in inputs}
        nans, columns = missing.nans != "keep", [column for _, column in inputs]
        texts = list_missing({n: kind for n, kind in types.items() if not kind.vector}, nulls=True, nans=nans)
        converted = {n: column for n, column in inputs if types[n].vector and not isinstance(column, str)}
        vectors = list_missing_in_vectors(converted, nans)
        which = find_first(texts.values(), vectors.values())
        outputs = Outputs.of(self._find_shapes(dataset, columns, which), wanted)
        _check_new(dataset, outputs.columns)
        from spark_elastic.estimators.predict_udf import MissingRows, predict_udf, restore_nan, ship_predictor

        rows = MissingRows.of(dataset.sparkSession, (*texts, *vectors), missing)
        predict = predict_udf(ship_predictor(dataset.sparkSession, self._predictor), outputs, rows)
        predicted = predict(*columns, which)
        added = dataset.withColumn(_ALL, predicted)
        for number, (name, width) in enumerate(zip(outputs.columns, outputs.widths, strict=True)):
            field = restore_nan(F.col(_ALL).getField(name), width)
            is_vector = outputs.contents and outputs.contents[number] != "class"
            added = added.withColumn(name, array_to_vector(field) if is_vector else field)
        added = added.drop(_ALL)
        return added.where(which < 0) if any(rows.drops) else added

    def _find_inputs(self, dataset: DataFrame) -> list[tuple[str, SparkColumn | str]]:
        """The columns that `feature_cols` names now, each in the place of one that was trained on, with their names."""
        trained = self._predictor.columns
        before = [column.name for column in trained]
        names = self.getOrDefault("feature_cols") if self.isDefined("feature_cols") else before
        if len(names) != len(trained):
            raise InvalidInput(
                f"feature_cols names {', '.join(names) or 'no column'}, and the model was trained on "
                f"{', '.join(before)}: name one column for each of these, in that order."
            )
        check_distinct_names(dataset, names)
        columns = [replace(column, name=name) for column, name in zip(trained, names, strict=True)]
        return [(column.name, model_input(dataset, column)) for column in columns]

    def _find_shapes(
        self, dataset: DataFrame, inputs: list[SparkColumn | str], which: SparkColumn
    ) -> list[Shape]:
        """which: below 0 in rows without missing values."""
        if self._known_shapes is not None:
            return self._known_shapes
        if not self._predictor.needs_sample:
            return self._predictor.shapes()
        row = dataset.where(which < 0).select(*inputs).first()
        if row is None:
            raise InvalidInput(
                "the table has no rows without missing values, on which a model with transformation_fn is tried."
            )
        return self._predictor.shapes([[value] for value in row])


def _widen(values: Sequence[Any]) -> list[Any]:
    """Whole numbers as floats where there are floats among them, since a column of Spark has one type."""
    mixed = any(isinstance(value, float) for value in values)
    return [float(value) if mixed and type(value) is int else value for value in values]


def try_shapes(predictor: Predictor, sample: Sequence[Any] | None) -> list[Shape] | None:
    """Shape of a row of each output, tried on a row of the training, since a table to predict may have none."""
    if sample is None:
        return None
    try:
        return predictor.shapes([[value] for value in sample])
    except Exception as error:  # the model is trained; `transform` will say what it cannot do with it
        log.debug("the model's outputs could not be tried: %s", error)
        return None


def _check_new(dataset: DataFrame, names: Sequence[str]) -> None:
    """Names as the session compares them."""
    folded = get_name_folding(dataset)
    there = {folded(name): name for name in dataset.columns}
    for name in names:
        found = there.get(folded(name))
        if found is not None:
            raise InvalidInput(
                f"the table has a column {found!r} already: choose another name for the prediction, or drop it there."
            )
    if len({folded(name) for name in names}) < len(names):
        raise InvalidInput(
            f"the predictions' columns would be called {', '.join(names)}: give each another name in prediction_col, "
            "probability_col, raw_prediction_col and output_cols."
        )


# A table's columns as a fitted model takes them: checked by the schema, before any job, against the trained ones.
#
# What a schema cannot tell (nulls, lengths, values beyond a dtype) `stack_rows` finds in the rows. Caller's thread.


# Which kinds of numpy's dtypes may stand for which, since each value stays what it is or is refused in the rows.
_TAKES = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "O": "O"}


def model_input(dataset: DataFrame, column: Column) -> SparkColumn | str:
    """The column, as the model's Python worker gets it; its name if it stays as it is, since a Column costs calls of
    the JVM. Raises InvalidInput if it is missing, or of another type than in training."""
    given = find_column_type(dataset.schema, column.name, transformed=True)
    spark_type = get_type(dataset.schema, column.name)
    if not _fits(given, column):
        trained = f"{column.dtype} of shape {column.shape}" if column.shape else column.dtype
        trained = f"arrays of {column.ragged}" if column.ragged else trained
        cause = f"the model was trained on {trained}: cast it to what it was in training."
        raise InvalidInput(f"column {column.name!r} is {spark_type.simpleString()}; {cause}")
    if given.vector or given.cast is not None:
        return convert_column(get_column(column.name), given)
    return _numbers(column.name, spark_type)


def _fits(given: ColumnType, column: Column) -> bool:
    trained = np.dtype(column.element[0])
    if trained.kind == "M":
        alike = given.dtype == column.element[0]
    else:
        alike = np.dtype(given.dtype).kind in _TAKES.get(trained.kind, "")
    # How deep arrays were before `input_shapes` is not known.
    deep = bool(column.element[1]) if given.dimensions else math.prod(column.shape) == 1 and not column.ragged
    return alike and deep


def _numbers(name: str, spark_type: DataType) -> SparkColumn | str:
    """Dates and timestamps as in training, in no time zone of a session, at any depth."""
    depth, element = 0, spark_type
    while isinstance(element, ArrayType):
        depth, element = depth + 1, element.elementType
    change: Callable[[SparkColumn], SparkColumn]
    if isinstance(element, TimestampType):
        change = F.unix_micros
    elif isinstance(element, TimestampNTZType):
        change = _count_micros
    elif isinstance(element, DateType):
        change = F.unix_date
    else:
        return quote(name)
    for _ in range(depth):
        change = _apply_to_elements(change)
    return change(get_column(name))


def _count_micros(time: SparkColumn) -> SparkColumn:
    """Microseconds since 1970 of a time without a zone: `unix_micros` would take it for one of the session's zone."""
    passed = time - F.lit("1970-01-01").cast("timestamp_ntz")
    return (passed.cast("interval second").cast("decimal(20, 6)") * 1_000_000).cast("long")


def _apply_to_elements(change: Callable[[SparkColumn], SparkColumn]) -> Callable[[SparkColumn], SparkColumn]:
    return lambda array: F.transform(array, change)
