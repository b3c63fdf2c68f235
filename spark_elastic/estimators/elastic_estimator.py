"""What the estimators of all frameworks share as estimators of Spark ML: fitting and saving."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.ml import Estimator
from pyspark.ml.util import DefaultParamsReader
from pyspark.sql import DataFrame

from spark_elastic.clusters.spark.host_facts import find_session, get_session
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.dataframe_rows import DataFrameRows
from spark_elastic.estimators.dataframes.schema import describe_class
from spark_elastic.estimators.fit_rows import HandleRows, RowSource, Selection, locate_rows, open_table_rows
from spark_elastic.estimators.params import EstimatorParams
from spark_elastic.estimators.rows import Rows
from spark_elastic.estimators.saving import Savable
from spark_elastic.estimators.transformer import ElasticModel
from spark_elastic.estimators.validation import FitRequest, build_request
from spark_elastic.tables.catalogs import find_in_catalog
from spark_elastic.tables.lake_tables import Version

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]

_UNSAVED = ("storage_options",)  # they may hold credentials


class ElasticEstimator(Savable, Estimator[Any], EstimatorParams):  # type: ignore[misc,unused-ignore]
    """Base of the estimators of torch and Keras."""

    _check_objects: Callable[[Mapping[str, Any]], Any]  # of the framework: see `build_request`
    _train: Callable[[RowSource, FitRequest[Any]], ElasticModel]  # of the framework

    def list_saved(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
        """Metadata, plain parameters, and the others in one pickle, so that shared objects stay shared."""
        values = {p.name: value for p, value in self._paramMap.items() if p.name not in _UNSAVED}
        objects = {name: value for name, value in values.items() if not _is_plain(value)}
        plain = {name: value for name, value in values.items() if name not in objects}
        return {}, plain, self._pack_objects(objects)

    @classmethod
    def load_saved(cls, metadata: dict[str, Any], parts: Mapping[str, bytes]) -> Any:
        estimator: Any = cls()
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata, skipParams=["settings"])
        estimator._set(**{**metadata["paramMap"], **estimator._unpack_objects(parts)})
        return estimator

    def fit_on_parquet(self, paths: Paths, validation_paths: Paths | None = None) -> Any:
        """Train on existing Parquet files without a copy. Needs a Spark session.

        paths: files or folders, local or fsspec urls that driver and executors share, read with `storage_options`.
        Row groups of any size, further columns and folders by partition are fine. validation_paths: of rows to look at
        after each epoch, instead of `validation`.

        Raises:
            InvalidInput: columns of different types or shapes, nulls (with their number), no rows, and as `fit`.
            StoreError: no Parquet files, or one that cannot be read.
        """
        options = self.getOrDefault("storage_options") or {}
        seen = [] if validation_paths is None else _list_paths(validation_paths)
        return self._fit_rows(locate_rows(find_session(), _list_paths(paths), seen, options))

    def fit_on_table(
        self,
        table: Any,
        version: Version | None = None,
        validation_table: Any = None,
        columns: Mapping[str, str] | None = None,
        where: Any = None,
        catalog: Any = None,
    ) -> Any:
        """Train on one version of a table of Delta Lake or Iceberg without a copy, each of its rows once per epoch,
        whatever is written to it meanwhile. Needs a Spark session, and the package `deltalake` or `pyiceberg`.

        Args:
            table: a name in Spark's catalog, a path or url that driver and executors share, an Iceberg table's
                metadata file, a `deltalake.DeltaTable` or a `pyiceberg.table.Table`. Its files are read with
                `storage_options`.
            version: a version of Delta, the id of a snapshot of Iceberg, or a time (a datetime or its ISO form) at
                which the table was in that state; None: the newest, or the one that a resumed run began with.
            validation_table: rows to look at after each epoch, instead of `validation`: all of its newest version.
            columns: name of a column here, as in feature_cols -> its name in the table, where they differ.
            where: the rows to train on: a list of comparisons that all must hold, such as `[("year", ">=", 2024),
                ("kind", "in", ["a", "b"])]`, with ==, !=, <, <=, >, >=, in, not in; or a list of such lists of which
                one must hold. Null matches nothing. Partitions and statistics that exclude a file or a row group save
                reading it; of others the driver reads the columns that are compared.
            catalog: that knows the tables by their names and vends credentials, which workers renew: a pyiceberg
                `Catalog`, or a dict such as `{"type": "rest", "uri": ...}` or `{"type": "unity", "uri": ..., "token":
                ...}`, of which a value may be a function or "env:NAME", a variable of each process.

        Raises:
            InvalidInput: no such table or version, features of the format that cannot be read here, and as
                `fit_on_parquet`.
            StoreError: a file of that version was vacuumed, or cannot be read.
        """
        options = self.getOrDefault("storage_options") or {}
        selection = Selection.parse(columns, where)
        table, validation_table = (find_in_catalog(catalog, each) for each in (table, validation_table))
        return self._fit_rows(
            open_table_rows(find_session(), table, version, validation_table, options, selection)
        )

    def fitMultiple(self, dataset: DataFrame, paramMaps: Any) -> Any:
        """See Spark ML. Raises InvalidInput if fits would share a `run_id`, since each fit is a run of its own."""
        if not isinstance(paramMaps, Sequence) or not all(isinstance(each, Mapping) for each in paramMaps):
            raise InvalidInput(
                f"param maps are dicts from Params to values, as ParamGridBuilder makes them; got {paramMaps!r}."
            )
        check_run_ids(self.getOrDefault("run_id"), [each.get(self.run_id) for each in paramMaps])
        return super().fitMultiple(dataset, paramMaps)

    def _fit(self, dataset: DataFrame | Rows) -> Any:
        """dataset: rows of a DataFrame, or a handle on rows that lie in files."""
        if isinstance(dataset, Rows):
            return self._fit_rows(HandleRows(get_session(None), dataset))
        return self._fit_rows(DataFrameRows(dataset))

    def _fit_rows(self, rows: RowSource) -> ElasticModel:
        request = build_request(self._values, self._check_objects)
        activation = request.objects.activation
        self.find_output_columns(activation)
        model = self._train(rows, request)
        self._copy_params_to(model, activation)
        return model

    @property
    def _values(self) -> dict[str, Any]:
        return {param.name: self.getOrDefault(param) for param in self.params}

    def _copy_params_to(self, model: ElasticModel, activation: str | None) -> None:
        """Give the fitted model this estimator's parameters. activation: the default, by the loss."""
        for param in filter(lambda each: self.isDefined(each.name), model.params):
            value = self.getOrDefault(param.name)
            copy = model._set if self.isSet(param.name) and value is not None else model._setDefault
            copy(**{param.name: value})
        if self.getOrDefault("activation") is None:
            model._setDefault(activation=activation)

    @abstractmethod
    def _pack_objects(self, objects: Mapping[str, Any]) -> dict[str, bytes]:
        """Serialize the parameters that JSON cannot hold: bytes by name."""

    @abstractmethod
    def _unpack_objects(self, parts: Mapping[str, bytes]) -> dict[str, Any]:
        """The parameters that `_pack_objects` has serialized."""


def check_run_ids(own: str | None, given: Sequence[str | None]) -> None:
    """Raise InvalidInput if fits would share a run_id. own: the estimator's; given: those of the param maps."""
    found = [own if each is None else each for each in given]
    named = [each for each in found if each is not None]
    shared = own if own in named else next((each for each in named if named.count(each) > 1), None)
    if shared is not None:
        raise InvalidInput(
            f"run_id {shared!r} names one run, and this would make several: leave run_id out; only a list of param "
            "maps that is fitted directly may give each map a run_id of its own."
        )


def _list_paths(given: Any) -> list[str]:
    several = [given] if isinstance(given, str | os.PathLike) else given
    is_list = isinstance(several, Sequence) and all(isinstance(path, str | os.PathLike) for path in several)
    if not is_list:
        raise InvalidInput(
            f"fit_on_parquet takes paths of Parquet files or folders; got {describe_class(given)}: give their paths, "
            "or call fit with a DataFrame."
        )
    return [str(path) for path in several]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
