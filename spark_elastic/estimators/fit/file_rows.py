"""The rows of a fit on Parquet files that are there: described, checked, and read where they lie.

Nothing of them is written or removed. Runs in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from spark_elastic.data.foreign import describe, locate
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.checks.validation import Request
from spark_elastic.estimators.fit.fit_rows import forgotten_unless_it_goes_on, recorded
from spark_elastic.estimators.fit.run_record import RunRecord
from spark_elastic.spark.dataframes.missing import Missing
from spark_elastic.state.held_run import HeldRun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    def found(
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
        files, names = locate([*paths, *validation_paths], storage_options)
        return cls(session, files, names[: len(paths)], names[len(paths) :])

    def check(self, request: Request) -> None:
        """Reads the files' footers, too."""
        if request.validation is not None:
            raise InvalidInput(
                "validation splits a table while it is written; fit_on_parquet reads files as they are: give "
                "validation_paths instead."
            )
        if request.missing != Missing():
            raise InvalidInput(
                "missing leaves out rows while a table is written; fit_on_parquet reads files as they are: use fit, or "
                "write the files without those rows."
            )
        self._described = (
            self._describe(request, self._names),
            self._describe(request, self._seen) if self._seen else None,
        )
        _same_columns(*self._described)

    def validates(self, request: Request) -> bool:
        return bool(self._seen)

    @contextmanager
    def held(self, request: Request, store: Store, run: HeldRun) -> Iterator[tuple[RunRecord, Store]]:
        """A run that goes on needs the files that it was begun with."""
        assert self._described is not None
        record = RunRecord.load(store, run.run_id)
        if record is None:
            record = recorded(request, self._files.url, *self._described)
            run.check()
            record.save(store, run.run_id)
        else:
            self.check_same(request, record, run.run_id)
        with forgotten_unless_it_goes_on(request, store, run, ""):
            yield record, self._files

    def _describe(self, request: Request, names: Sequence[str]) -> Manifest:
        transformed = request.brought.transformation is not None
        return describe(self._files, request.used_cols, transformed, names=names)

    def check_same(self, request: Request, record: RunRecord, run_id: str) -> None:
        assert self._described is not None
        manifest, seen = self._described
        before = record.validating()
        if record.rows() != manifest or (None if before is None else before[0]) != seen:
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
