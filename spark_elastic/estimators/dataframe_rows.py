"""The rows of `fit(df)`: written to the store, or left in the files that the DataFrame scans.

A run that is resumed keeps to what it began with. Rows that are left where they are have the order of the files. So
`materialize="auto"` leaves them only where the table's order was asked for: otherwise the same rows would train in
another order once they are cached or filtered. Runs in the caller's thread.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np
from pyspark.sql import DataFrame, SparkSession

from spark_elastic.checks import make_choice
from spark_elastic.data.manifest import Column
from spark_elastic.data.store import Store, parse_store_url
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.dataframes.file_scan import (
    FileScan,
    NoFileScan,
    estimate_bytes,
    find_file_scan,
    make_footer_collector,
)
from spark_elastic.estimators.dataframes.materialize import ValidationSplit, WriteOptions, find_difference
from spark_elastic.estimators.dataframes.materialize import materialize as write_dataframe
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.estimators.dataframes.schema import (
    ColumnType,
    check_columns,
    check_distinct_names,
    check_is_dataframe,
    check_validation_column,
    find_column_type,
)
from spark_elastic.estimators.fit_rows import (
    FoundRows,
    Options,
    Request,
    RowSource,
    RunRecord,
    choose_group_bytes,
    find_conversion,
    find_conversion_of_rows,
    list_names,
    refuse_run,
)
from spark_elastic.estimators.validation import MATERIALIZE
from spark_elastic.runs.checkpoint import OwnedRun
from spark_elastic.tables.existing_parquet import PIECE_BYTES, describe_files, find_data_files
from spark_elastic.tables.footers import CollectFooters, DataFile, FileFacts
from spark_elastic.tables.lake_tables import read_snapshot
from spark_elastic.tables.predicate import Predicate

log = logging.getLogger("spark_elastic")


WRITTEN_SOON = 32 << 20  # bytes that Spark expects of a DataFrame that is written in seconds


class DataFrameRows(RowSource):
    """The rows of a DataFrame, wherever they are for a run; `check` looks for its files."""

    def __init__(self, df: DataFrame) -> None:
        self._df = df
        self._verified_manifest: str | None = None  # as JSON: known to have this DataFrame's rows

    @property
    def session(self) -> SparkSession:  # type: ignore[override] # of what may be no DataFrame
        return self._df.sparkSession

    def check(self, request: Request) -> None:
        """Also reads the footers of the files that are trained on where they are."""
        self._check_columns(request)
        names = list(dict.fromkeys(request.config.data.used_cols))
        transformed, size = request.objects.transformation is not None, choose_group_bytes(request)
        find = partial(find_scanned_rows, self._df, names, transformed, size, request.storage_options)
        self.found = _find_unless_written(request.materialize, find_obstacle(request), find)

    def _check_columns(self, request: Request) -> None:
        check_is_dataframe(self._df, "fit")
        if self._df.isStreaming:
            raise InvalidInput(
                "the DataFrame is a stream, which has no end: read its source with spark.read, or fit in foreachBatch."
            )
        data, schema = request.config.data, self._df.schema
        transformed = request.objects.transformation is not None
        check_columns(schema, data, transformed)
        used = data.used_cols
        if isinstance(data.validation, str):
            check_validation_column(schema, data.validation)
            used.append(data.validation)
        check_distinct_names(self._df, used)

    def are_written_soon(self) -> bool:
        return self.found is None and estimate_bytes(self._df) <= WRITTEN_SOON

    def describe(self, record: RunRecord) -> str:
        return super().describe(record) if self._are_found(record) else "a DataFrame"

    def check_same_rows(self, request: Request, record: RunRecord, run_id: str) -> None:
        if self._are_found(record):
            super().check_same_rows(request, record, run_id)
            return
        if record.is_on_files:
            raise refuse_run(run_id, f"on the files in {record.data}")
        if record.rows.manifest == self._verified_manifest:
            return
        validation = record.load_validation()
        written = [record.load_manifest(), *([] if validation is None else [validation[0]])]
        found = find_difference(self._df, request.config.data.used_cols, _write_options(request), written)
        if found is not None:
            raise refuse_run(run_id, f"with another table ({found})")
        self._verified_manifest = record.rows.manifest

    def begin_run(self, request: Request, store: Store, run: OwnedRun) -> RunRecord:
        """Write the rows, to a folder of the run unless `keep_data`, then the record, which binds the run to them."""
        if self.found is not None:
            return super().begin_run(request, store, run)
        folder = "" if request.keep_data else f"runs/{run.run_id}/rows"
        place, columns = _open_folder(store, folder), request.config.data.used_cols
        try:
            rows, validation = write_dataframe(self._df, columns, place, _write_options(request))
            record = RunRecord.create(request, folder, rows, validation)
            run.check()
            record.save(store, run.run_id)
        except BaseException:
            run.delete_run(folder)
            raise
        self._verified_manifest = record.rows.manifest
        return record

    def open_data(self, store: Store, record: RunRecord) -> Store:
        return (
            super().open_data(store, record) if self._are_found(record) else _open_folder(store, record.data)
        )

    def _are_found(self, record: RunRecord) -> bool:
        """Whether the rows of a run are those that `check` has found, and not written ones."""
        return self.found is not None and record.is_on_files


def _open_folder(store: Store, folder: str) -> Store:
    return replace(store, url=store.join(folder), root=store.path(folder)) if folder else store


def _write_options(request: Request) -> WriteOptions:
    data = request.config.data
    return WriteOptions(
        transformed=request.objects.transformation is not None,
        missing=request.missing,
        row_order=data.row_order or ("hash" if data.shuffle else "table"),
        row_group_bytes=choose_group_bytes(request),
        split=None if data.validation is None else ValidationSplit(data.validation, data.seed),
    )


def find_or_write_rows(
    df: DataFrame,
    store: Any,
    columns: Sequence[str] | None,
    row_order: str | None,
    missing: Any,
    materialize: str,
    storage_options: Options,
) -> tuple[Any, ...]:
    """The fields of `Rows.from_dataframe`."""
    check_is_dataframe(df, "Rows.from_dataframe")
    names = list_names(columns, df.columns)
    order = make_choice("hash", "table").or_none()("row_order", row_order)
    treatment = MissingValues.parse(missing)
    types = {name: find_column_type(df.schema, name, transformed=True) for name in names}
    check_distinct_names(df, names)
    where = make_choice(*MATERIALIZE)("materialize", materialize)
    has_floats = any(np.dtype(each.dtype).kind == "f" for each in types.values())
    written = "hash" if order is None and where == "auto" else order
    without = "missing={'nans': 'keep'}" if has_floats else ""
    conversion = find_conversion_of_rows(treatment, written, without)
    find = partial(find_scanned_rows, df, names, True, PIECE_BYTES, storage_options)
    found = _find_unless_written(where, conversion and conversion[0], find)
    if found is not None:
        return found.store, found.rows, found.source
    if store is None:
        raise InvalidInput("store is missing: give a path or url that driver and workers share.")
    target = Store.open(parse_store_url(store), **storage_options)
    options = WriteOptions(transformed=True, missing=treatment, row_order=order or "hash")
    manifest, _ = write_dataframe(df, names, target, options)
    return target, manifest, "a DataFrame", treatment.nans != "keep"


def _find_unless_written(
    materialize: str, obstacle: str | None, find: Callable[[], FoundRows]
) -> FoundRows | None:
    """The rows where they are; None: they are to be written. obstacle: why, whatever the DataFrame scans."""
    if materialize == "always":
        return None
    try:
        if obstacle is not None:
            raise NoFileScan(obstacle)
        found = find()
    except (NoFileScan, InvalidInput, StoreError) as reason:
        if materialize == "auto":
            log.info("the rows are written to the store, because %s", reason)
            return None
        if not isinstance(reason, NoFileScan):
            raise
        raise InvalidInput(
            "materialize='never' takes rows of files that exist, with columns selected and renamed at most, and "
            f"here {reason}: use materialize='auto', or save that as a table and take its rows."
        ) from reason
    log.info("the rows are read where they are: %s", found.source)
    return found


def find_obstacle(request: Request) -> str | None:
    """Why the rows must be written to become those that the request asks for; None: they need not be."""
    data, conversion = request.config.data, find_conversion(request)
    if conversion is not None:
        return conversion[0]
    if data.reader != "arrow":
        return f"reader={data.reader!r} reads what was written for it"
    if request.materialize == "auto" and data.row_order is None and data.shuffle:
        return (
            "the order of their hash sorts the rows while they are written (row_order='table' leaves them where they "
            "are, if the DataFrame only scans files)"
        )
    return None


def find_scanned_rows(
    df: DataFrame, names: Sequence[str], transformed: bool, piece_bytes: int, storage_options: Options
) -> FoundRows:
    """The rows of the files that a DataFrame scans. Raises NoFileScan, and as `describe_files` does."""
    scan = find_file_scan(df, names)
    types = {name: find_column_type(df.schema, name, transformed=transformed) for name in names}
    if scan.kind == "parquet":
        files, parts = find_data_files(scan.urls, list(scan.columns.values()), storage_options)
        kind, collect = "files of Parquet", _collect_without_paths
    else:
        (url,) = scan.urls
        snapshot = read_snapshot(url, scan.version, storage_options)
        files, parts, kind = snapshot.store, snapshot.files, f"files of {snapshot.name}"
        _check_same_files(df, scan, parts)
        collect = make_footer_collector
    if any(name != stored for name, stored in scan.columns.items()):
        parts = tuple(part.rename_columns(scan.columns) for part in parts)
    found = describe_files(files, parts, names, transformed, piece_bytes, collect=collect(df.sparkSession))
    columns = tuple(_convert(column, types[column.name], parts) for column in found.columns)
    source = f"{len(parts)} {kind} in {files.url}"
    return FoundRows(files, replace(found, columns=columns), None, files.url, source)


def _collect_without_paths(session: SparkSession) -> CollectFooters:
    """Raises NoFileScan for a column of plain files whose paths tell of it, too: Spark takes the path's value."""

    def collect(
        store: Store, parts: Sequence[DataFile], columns: Sequence[str], where: Predicate | None
    ) -> list[FileFacts]:
        found = make_footer_collector(session)(store, parts, columns, where)
        for name in columns:
            if any(name in facts.nulls for facts in found) and any(name in part.constants for part in parts):
                raise NoFileScan(f"column {name!r} is in the files and in their paths, too")
        return found

    return collect


def _convert(column: Column, kind: ColumnType, parts: Sequence[DataFile]) -> Column:
    """The column in the DataFrame's type. Raises NoFileScan if reading does not give that."""
    in_paths = all(column.name in part.constants for part in parts)
    if in_paths and column.dtype == "datetime64[us]":
        raise NoFileScan(f"column {column.name!r} has times in the files' paths, whose zone Spark decides")
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
