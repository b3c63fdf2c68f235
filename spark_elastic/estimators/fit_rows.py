"""The rows of a fit: a table's, written to the store, held for its run, and let go.

Owns which rows train and which validate. Runs in the caller's thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spark_elastic.data.existing_parquet import describe_parquet, locate_files
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.run_record import RunRecord
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.spark.dataframes.materialize import (
    How,
    ValidationSplit,
    WriteOptions,
    find_difference,
    materialize,
    materialize_split,
)
from spark_elastic.spark.dataframes.scan import MissingValues
from spark_elastic.spark.dataframes.schema import check_columns, check_validation_column
from spark_elastic.state.checkpoint import CheckpointStore
from spark_elastic.state.run_lease import RunLease

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


log = logging.getLogger("spark_elastic")


class RowSource(Protocol):
    """Where the rows of a fit come from."""

    @property
    def session(self) -> SparkSession: ...

    def check(self, request: FitRequest) -> None:
        """InvalidInput where the columns cannot be what the request says; starts no job."""
        ...

    def has_validation(self, request: FitRequest) -> bool:
        """Whether there are rows to validate with after each epoch."""
        ...

    def check_same_rows(self, request: FitRequest, record: RunRecord, run_id: str) -> None:
        """InvalidInput where the run was begun on other rows (R19); may start a job."""
        ...

    def materialize_rows(
        self, request: FitRequest, store: Store, run: RunLease
    ) -> AbstractContextManager[tuple[RunRecord, Store]]:
        """The run's record, and the store that its rows lie in, for as long as the run needs them."""
        ...


class TableRows:
    """A DataFrame's, written to the store."""

    def __init__(self, df: DataFrame) -> None:
        self._df = df
        self._known: str | None = None  # a manifest that was written from it, or found to be of the same rows

    @property
    def session(self) -> SparkSession:
        return self._df.sparkSession

    def check(self, request: FitRequest) -> None:
        if self._df.isStreaming:
            raise InvalidInput(
                "the DataFrame is a stream, which has no end: read its source with spark.read, or fit in foreachBatch."
            )
        check_columns(
            self._df.schema,
            request.feature_cols,
            request.label_cols,
            request.sample_weight_col,
            transformed=request.brought.transformation is not None,
        )
        if isinstance(request.validation, str):
            check_validation_column(self._df.schema, request.validation)

    def has_validation(self, request: FitRequest) -> bool:
        return request.validation is not None

    def check_same_rows(self, request: FitRequest, record: RunRecord, run_id: str) -> None:
        if "://" in record.data:
            raise InvalidInput(
                f"run_id {run_id!r} was begun by fit_on_parquet on {record.data}: go on with that, or use another "
                "run_id."
            )
        if record.manifest == self._known:
            return
        validating = record.load_validation()
        written = [record.load_manifest(), *([] if validating is None else [validating[0]])]
        found = find_difference(self._df, request.used_cols, _how(request), written)
        if found is not None:
            raise InvalidInput(
                f"run_id {run_id!r} was begun with another table ({found}): go on with the same, or use another run_id."
            )
        self._known = record.manifest

    @contextmanager
    def materialize_rows(
        self, request: FitRequest, store: Store, run: RunLease
    ) -> Iterator[tuple[RunRecord, Store]]:
        """The rows are written for later fits, too (`keep_data`), or to a folder of the run until it has succeeded.

        A run that goes on goes on with the rows that it was begun with.
        """
        own = "" if request.keep_data else f"runs/{run.run_id}/rows"
        record = RunRecord.load(store, run.run_id)
        if record is None:
            try:
                manifest, seen = _written(self._df, request, _inside(store, own))
                record = build_record(request, own, manifest, seen)
                run.check()
                record.save(store, run.run_id)
            except BaseException:
                run.delete(own)
                raise
            self._known = record.manifest
        else:
            self.check_same_rows(request, record, run.run_id)
        with release_rows_after_run(request, store, run, record.data):
            yield record, _inside(store, record.data)


@contextmanager
def release_rows_after_run(request: FitRequest, store: Store, run: RunLease, rows: str) -> Iterator[None]:
    """Afterwards, `rows`, a folder of the run ("": none), go; they and the record of a run that can go on stay."""
    try:
        yield
    except BaseException:
        if _goes_on(request, store, run.run_id):
            log.warning("run %s can go on: fit again with run_id=%r", run.run_id, run.run_id)
        else:
            run.delete(rows)
        raise
    run.release(rows)


def build_record(request: FitRequest, data: str, manifest: Manifest, seen: Manifest | None) -> RunRecord:
    """The record of a new run on these rows, which lie in `data`; `seen`: those that validate."""
    validation = None if seen is None else (seen, _validation_plan(request, seen))
    return RunRecord.create(request, data, (manifest, _plan(request, manifest)), validation)


def _inside(store: Store, folder: str) -> Store:
    return dataclasses.replace(store, url=store.join(folder), root=store.path(folder)) if folder else store


def _goes_on(request: FitRequest, store: Store, run_id: str) -> bool:
    """Whether something of the failed run is worth its rows' room."""
    try:
        return request.store is not None and bool(CheckpointStore(store, run_id).published())
    except StoreError:
        return True  # for all that is known


def _written(df: DataFrame, request: FitRequest, store: Store) -> tuple[Manifest, Manifest | None]:
    """Rows to train on, and rows to validate with."""
    how = _how(request)
    if how.split is None:
        return materialize(df, request.used_cols, store, how.writing), None
    return materialize_split(df, request.used_cols, store, how.split, how.writing)


def _how(request: FitRequest) -> How:
    writing = WriteOptions(transformed=request.brought.transformation is not None, missing=request.missing)
    if request.validation is None:
        return How(writing, None)
    column = request.validation if isinstance(request.validation, str) else None
    fraction = 0.0 if isinstance(request.validation, str) else request.validation
    return How(writing, ValidationSplit(fraction, column, request.seed))


def _validation_plan(request: FitRequest, seen: Manifest) -> DataPlan:
    return DataPlan.for_run(
        seen.group_rows,
        (request.val_batch_size or request.batch_size) * request.num_workers,
        request.seed,
        request.max_workers,
        seen.max_decoded_group_bytes(),
        DEFAULT_CACHE_BYTES,
        shuffle=False,
    )


def _plan(request: FitRequest, manifest: Manifest) -> DataPlan:
    return DataPlan.for_run(
        manifest.group_rows,
        request.global_batch,
        request.seed,
        request.max_workers,
        manifest.max_decoded_group_bytes(),
        DEFAULT_CACHE_BYTES,
        request.shuffle,
    )


# The rows of a fit on Parquet files that are there: described, checked, and read where they lie.
#
# Nothing of them is written or removed. Runs in the caller's thread.


class FileRows:
    """Described once, by `check`."""

    def __init__(
        self, session: SparkSession, files: Store, names: Sequence[str], seen: Sequence[str]
    ) -> None:
        """files: where all of them lie. names: of files or folders there, to train on; seen: to validate with."""
        self.session = session
        self._files = files
        self._names, self._seen = names, seen
        self._described: tuple[Manifest, Manifest | None] | None = None

    @classmethod
    def locate(
        cls,
        session: SparkSession | None,
        paths: Sequence[str],
        validation_paths: Sequence[str],
        storage_options: Mapping[str, Any],
    ) -> FileRows:
        """Raises InvalidInput where there is no session, no path, or several file systems."""
        if session is None:
            raise InvalidInput("There is no active Spark session: create one, as for `fit`.")
        if not paths:
            raise InvalidInput("paths is empty: name a Parquet file or a folder.")
        files, names = locate_files([*paths, *validation_paths], storage_options)
        return cls(session, files, names[: len(paths)], names[len(paths) :])

    def check(self, request: FitRequest) -> None:
        """Reads the files' footers, too."""
        if request.validation is not None:
            raise InvalidInput(
                "validation splits a table while it is written; fit_on_parquet reads files as they are: give "
                "validation_paths instead."
            )
        if request.missing != MissingValues():
            raise InvalidInput(
                "missing leaves out rows while a table is written; fit_on_parquet reads files as they are: use fit, or "
                "write the files without those rows."
            )
        self._described = (
            self._describe(request, self._names),
            self._describe(request, self._seen) if self._seen else None,
        )
        _same_columns(*self._described)

    def has_validation(self, request: FitRequest) -> bool:
        return bool(self._seen)

    @contextmanager
    def materialize_rows(
        self, request: FitRequest, store: Store, run: RunLease
    ) -> Iterator[tuple[RunRecord, Store]]:
        """A run that goes on needs the files that it was begun with."""
        assert self._described is not None
        record = RunRecord.load(store, run.run_id)
        if record is None:
            record = build_record(request, self._files.url, *self._described)
            run.check()
            record.save(store, run.run_id)
        else:
            self.check_same_rows(request, record, run.run_id)
        with release_rows_after_run(request, store, run, ""):
            yield record, self._files

    def _describe(self, request: FitRequest, names: Sequence[str]) -> Manifest:
        transformed = request.brought.transformation is not None
        return describe_parquet(self._files, request.used_cols, transformed, names=names)

    def check_same_rows(self, request: FitRequest, record: RunRecord, run_id: str) -> None:
        assert self._described is not None
        manifest, seen = self._described
        before = record.load_validation()
        if record.load_manifest() != manifest or (None if before is None else before[0]) != seen:
            raise InvalidInput(
                f"run_id {run_id!r} was begun on other files than those now in {self._files.url}, or on a table: bring "
                "them back, or use another run_id."
            )


def _same_columns(trained: Manifest, seen: Manifest | None) -> None:
    """Of another precision they may be."""
    for one, other in zip(trained.columns, () if seen is None else seen.columns, strict=seen is not None):
        if (_kind(one), one.shape) != (_kind(other), other.shape):
            raise InvalidInput(
                f"column {one.name!r} is {other.dtype} of shape {other.shape} in validation_paths, and {one.dtype} of "
                f"shape {one.shape} in the files that are trained on: write them alike."
            )


def _kind(column: Column) -> str:
    return np.dtype(column.dtype).kind.replace("u", "i")
