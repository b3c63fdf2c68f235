"""The rows of `fit(df)`: written to the store, or left in the files that the DataFrame scans.

Decides between the two (`materialize`) and says why in the log; a run that is resumed keeps to what it began with. Rows
that are left where they are have the order of the files. So `materialize="auto"` leaves them only where the table's
order was asked for: otherwise the same rows would train in another order once they are cached or filtered. Runs in the
caller's thread.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from spark_elastic.checks import make_choice
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.store import Store, parse_store_url
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.dataframes.file_footers import make_footer_collector
from spark_elastic.estimators.dataframes.file_scan import FileScan, NoFileScan, find_file_scan
from spark_elastic.estimators.dataframes.materialize import WriteOptions
from spark_elastic.estimators.dataframes.materialize import materialize as write_dataframe
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.estimators.dataframes.schema import (
    ColumnType,
    check_distinct_names,
    check_is_dataframe,
    find_column_type,
)
from spark_elastic.estimators.fit_rows import (
    FileRows,
    Request,
    TableRows,
    choose_group_bytes,
    find_conversion,
    find_fit_conversion,
    list_names,
)
from spark_elastic.estimators.run_record import RunRecord
from spark_elastic.estimators.validation import MATERIALIZE
from spark_elastic.runs.owned_run import OwnedRun
from spark_elastic.tables.existing_parquet import PIECE_BYTES, describe_files, find_data_files
from spark_elastic.tables.footers import DataFile, FileFacts
from spark_elastic.tables.lake_tables import read_snapshot
from spark_elastic.tables.predicate import Predicate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("spark_elastic")

# What `FileScan.kind` "parquet" is called in messages.
PLAIN_FILES = "files of Parquet"


class DataFrameRows:
    """The rows of a DataFrame, wherever they are for a run; `check` looks for its files."""

    def __init__(self, df: DataFrame) -> None:
        self._df = df
        self._written = TableRows(df)
        # The files that may be trained on where they are, once `check` has found them.
        self._scanned: ScannedRows | None = None

    @property
    def session(self) -> SparkSession:
        return self._written.session

    def check(self, request: Request) -> None:
        """Also reads the footers of the files that are trained on where they are."""
        self._written.check(request)
        self._scanned = None
        if request.materialize == "always":
            return
        try:
            refuse_conversions(request)
            names = list(dict.fromkeys(request.config.used_cols))
            self._scanned = ScannedRows.find(
                self._df,
                names,
                request.objects.transformation is not None,
                choose_group_bytes(request),
                request.storage_options,
            )
        except NoFileScan as reason:
            if request.materialize == "never":
                raise InvalidInput(
                    "materialize='never' trains on files that exist, with columns selected and renamed at most, and "
                    f"here {reason}: use materialize='auto', or save that as a table and fit on it."
                ) from reason
            log.info("the rows are written to the store, because %s", reason)
        except (InvalidInput, StoreError) as reason:
            if request.materialize == "never":
                raise
            log.info("the rows are written to the store, because their files are no data set: %s", reason)
        else:
            log.info("the rows are read where they are: %s", self._scanned.description)

    def has_validation(self, request: Request) -> bool:
        return self._written.has_validation(request)

    def describe(self, record: RunRecord) -> str:
        return self._choose(record).describe(record)

    def check_same_rows(self, request: Request, record: RunRecord, run_id: str) -> None:
        self._choose(record).check_same_rows(request, record, run_id)

    def begin_run(self, request: Request, store: Store, run: OwnedRun) -> RunRecord:
        return self._choose(None).begin_run(request, store, run)

    def open_data(self, store: Store, record: RunRecord) -> Store:
        return self._choose(record).open_data(store, record)

    def _choose(self, record: RunRecord | None) -> TableRows | ScannedRows:
        """record: of the run that is resumed, if there is one."""
        is_written = record is not None and not record.is_on_files
        return self._written if self._scanned is None or is_written else self._scanned


def find_or_write_rows(
    df: DataFrame,
    store: Any,
    columns: Sequence[str] | None,
    row_order: str | None,
    missing: Any,
    materialize: str,
    storage_options: Mapping[str, Any],
) -> tuple[Any, ...]:
    """The fields of `Rows.from_dataframe`."""
    check_is_dataframe(df, "Rows.from_dataframe")
    names = list_names(columns, df.columns)
    order = make_choice("hash", "table").or_none()("row_order", row_order)
    treatment = MissingValues.parse(missing)
    types = {name: find_column_type(df.schema, name, transformed=True) for name in names}
    check_distinct_names(df, names)
    where = make_choice(*MATERIALIZE)("materialize", materialize)
    if where != "always":
        try:
            written = "hash" if order is None and where == "auto" else order
            has_floats = any(np.dtype(each.dtype).kind == "f" for each in types.values())
            conversion = find_conversion(
                treatment, written, avoids_nan_check="missing={'nans': 'keep'}" if has_floats else ""
            )
            if conversion is not None:
                raise NoFileScan(conversion[0])
            return ScannedRows.find(df, names, True, PIECE_BYTES, storage_options).facts
        except NoFileScan as reason:
            if where == "never":
                raise InvalidInput(f"the rows cannot be read where they are, because {reason}.") from reason
            log.info("the rows are written to the store, because %s", reason)
    if store is None:
        raise InvalidInput("store is missing: give a path or url that driver and workers share.")
    target = Store.open(parse_store_url(store), **storage_options)
    options = WriteOptions(transformed=True, missing=treatment, row_order=order or "hash")
    manifest, _ = write_dataframe(df, names, target, options)
    return target, manifest, "a DataFrame", treatment.nans != "keep"


def refuse_conversions(request: Request) -> None:
    """Raises NoFileScan if the rows must be written to become those that the request asks for."""
    config, conversion = request.config, find_fit_conversion(request)
    if conversion is not None:
        raise NoFileScan(conversion[0])
    if config.reader != "arrow":
        raise NoFileScan(f"reader={config.reader!r} reads what was written for it")
    if request.materialize == "auto" and config.row_order is None and config.shuffle:
        raise NoFileScan(
            "the order of their hash sorts the rows while they are written (row_order='table' leaves them where they "
            "are, if the DataFrame only scans files)"
        )


class ScannedRows(FileRows):
    """The rows of files that a DataFrame scans, with columns as the DataFrame names them."""

    call = "fit"

    def __init__(
        self,
        session: SparkSession,
        files: Store,
        parts: Sequence[DataFile],
        types: Mapping[str, ColumnType],
        kind: str,
    ) -> None:
        """types: of the DataFrame's columns. kind: what the files are of, for messages."""
        super().__init__(session, files, (), ())
        self._parts, self._types, self._kind = parts, types, kind

    @classmethod
    def find(
        cls,
        df: DataFrame,
        names: Sequence[str],
        transformed: bool,
        piece_bytes: int,
        storage_options: Mapping[str, Any],
    ) -> ScannedRows:
        """Reads the files' footers. transformed, piece_bytes: as for `describe_files`.

        Raises NoFileScan for other DataFrames, and as `describe_files` does.
        """
        scan = find_file_scan(df, names)
        types = {name: find_column_type(df.schema, name, transformed=transformed) for name in names}
        if scan.kind == "parquet":
            columns = list(scan.columns.values())
            files, parts = find_data_files(scan.urls, columns, storage_options)
            kind = PLAIN_FILES
        else:
            (url,) = scan.urls
            snapshot = read_snapshot(url, scan.version, storage_options)
            files, parts, kind = snapshot.store, snapshot.files, f"files of {snapshot.name}"
            _check_same_files(df, scan, parts)
        if any(name != stored for name, stored in scan.columns.items()):
            parts = tuple(part.rename_columns(scan.columns) for part in parts)
        rows = cls(df.sparkSession, files, parts, types, kind)
        found = describe_files(files, parts, names, transformed, piece_bytes, collect=rows._collect_footers)
        rows._described = replace(found, columns=tuple(map(rows._convert, found.columns))), None
        return rows

    @property
    def description(self) -> str:
        """The files, for people."""
        return f"{len(self._parts)} {self._kind} in {self._files.url}"

    @property
    def facts(self) -> tuple[Store, Manifest, str]:
        """The fields of `Rows`."""
        assert self._described is not None
        return self._files, self._described[0], self.description

    def describe(self, record: RunRecord) -> str:
        return self.description

    def _collect_footers(
        self, store: Store, parts: Sequence[DataFile], columns: Sequence[str], where: Predicate | None = None
    ) -> list[FileFacts]:
        """Raises NoFileScan for a column of plain files whose paths tell of it, too: Spark takes the path's value."""
        found = make_footer_collector(self.session)(store, parts, columns, where)
        for name in columns if self._kind == PLAIN_FILES else ():
            if any(name in facts.nulls for facts in found) and any(name in part.constants for part in parts):
                raise NoFileScan(f"column {name!r} is in the files and in their paths, too")
        return found

    def _convert(self, column: Column) -> Column:
        """The column in the DataFrame's type. Raises NoFileScan if reading does not give that."""
        kind = self._types[column.name]
        in_paths = all(column.name in part.constants for part in self._parts)
        if in_paths and column.dtype == "datetime64[us]":
            raise NoFileScan(
                f"column {column.name!r} has times in the files' paths, whose zone Spark decides"
            )
        if column.element == (kind.dtype, kind.dimensions):
            return column
        if in_paths and not kind.dimensions and np.dtype(kind.dtype).kind in "iuf":
            return replace(column, dtype=kind.dtype)
        raise NoFileScan(
            f"column {column.name!r} is {column.element[0]} of {column.element[1]} dimensions in the files, and "
            f"{kind.dtype} of {kind.dimensions} in the DataFrame"
        )


def _check_same_files(df: DataFrame, scan: FileScan, parts: Sequence[DataFile]) -> None:
    """Raises NoFileScan if Spark has other files for the version of a table of Delta than its log."""
    if scan.kind == "delta":
        ours = {posixpath.basename(part.info.name) for part in parts}
        if ours != {posixpath.basename(unquote(path)) for path in df.inputFiles()}:
            raise NoFileScan(f"Spark reads other files than version {scan.version} of {scan.urls[0]} has")
