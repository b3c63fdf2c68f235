"""The rows of a fit: where they are, and what a run keeps of them. Those of a DataFrame are in `dataframe_rows.py`.

Runs in the caller's thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from spark_elastic.clusters.spark.host_facts import find_session
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.packing import format_remedy
from spark_elastic.data.plan import DataPlan, count_affordable_lanes
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.row_handle import RowHandle
from spark_elastic.data.store import Store, parse_document
from spark_elastic.errors import CoordinatorLost, InvalidInput, StoreError, format_columns
from spark_elastic.estimators.dataframes.file_scan import make_footer_collector
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.protocol.messages import SPARK_STOPPED
from spark_elastic.rendezvous import codec
from spark_elastic.runs.checkpoint import CheckpointStore, OwnedRun
from spark_elastic.runs.identity import WEIGHTS
from spark_elastic.tables.existing_parquet import (
    PIECE_BYTES,
    align_ragged,
    describe_files,
    describe_parquet,
    list_columns,
    list_parquet_columns,
    locate_files,
)
from spark_elastic.tables.footers import CollectFooters, DataFile, collect_footers_in_threads
from spark_elastic.tables.lake_tables import TableSnapshot, Version, join_stores, read_snapshot
from spark_elastic.tables.predicate import Predicate

log = logging.getLogger("spark_elastic")

Request = FitRequest[Any]
Options = Mapping[str, Any]  # fsspec's
FORMAT = 5  # of run.json
# Parts that are words, or anything but a slash in backquotes.
_TABLE_NAME = re.compile(r"(?:\w+|`[^/]+`)(?:\.(?:\w+|`[^/]+`))*")


def refuse_run(run_id: str, began: str) -> InvalidInput:
    return InvalidInput(f"run_id {run_id!r} began {began}: continue with the same, or use another run_id.")


@dataclass(frozen=True)
class RowRecord:
    """Rows of a run, and their order, beside what the settings say of it."""

    manifest: str  # as JSON
    global_batch: int  # rows of one step
    lanes: int  # streams that an epoch is cut into

    @classmethod
    def create(cls, request: Request, manifest: Manifest, global_batch: int, shuffle: bool) -> RowRecord:
        plan = plan_rows(request, manifest, global_batch, shuffle)
        return cls(manifest.to_json(), plan.global_batch, plan.lanes)


@dataclass(frozen=True)
class RunRecord:
    """Everything that stays the same when a run is resumed, whatever the number of workers then is."""

    data: str  # a folder of the store ("": its root), or the url of existing files, or those of two tables
    rows: RowRecord  # what is trained on
    validation: RowRecord | None  # what is validated with; None: nothing
    settings: Mapping[str, Any]  # the parameters that must stay the same
    objects: Mapping[str, str]  # digests of the user's objects, by the names that an error has for them
    format: int = FORMAT  # of this record; a release reads its own alone

    @classmethod
    def create(cls, request: Request, data: str, rows: Manifest, validation: Manifest | None) -> RunRecord:
        """The record of a new run on these rows, which are in `data`."""
        config, seen = request.config, None
        trained = RowRecord.create(request, rows, config.global_batch, config.data.shuffle)
        if validation is not None:
            batch = config.data.validation_batch * config.world.num_workers
            seen = RowRecord.create(request, validation, batch, shuffle=False)
        return cls(data, trained, seen, config.list_run_settings(), request.objects.identity())

    @property
    def is_on_files(self) -> bool:
        """Whether the rows are those of files that were there before the run."""
        return "://" in self.data

    @classmethod
    def load(cls, store: Store, run_id: str) -> RunRecord | None:
        """The run's record, or None while the run has none. Raises StoreError for one of another format, or damaged."""
        name = f"runs/{run_id}/run.json"
        if not store.exists(name):
            return None

        def read(fields: Any) -> RunRecord:
            found = fields.get("format", 1)
            if found != FORMAT:
                raise StoreError(
                    f"{name} in the store {store.url} has format {found}, and this release reads {FORMAT}: continue "
                    "the run with the release that began it."
                )
            record: RunRecord = codec.read(cls, fields)
            itemgetter("shuffle", "seed", "batch_size", "backward_passes_per_step")(record.settings)
            return record

        return parse_document(store.read_bytes(name), f"{name} in the store {store.url}", read)

    def save(self, store: Store, run_id: str) -> None:
        store.write_bytes(f"runs/{run_id}/run.json", json.dumps(asdict(self)).encode())

    def check(self, request: Request, run_id: str) -> None:
        """Raises InvalidInput with the first setting, or object of the user's, that differs."""
        for name, value in request.config.list_run_settings().items():
            before = self.settings.get(name, value)  # a parameter may be newer than the run
            if before != value:
                raise refuse_run(run_id, f"with {name}={before!r} and this fit has {value!r}")
        now = request.objects.identity() if self.objects else {}
        different = [name for name, before in self.objects.items() if now.get(name) != before]
        if different == [WEIGHTS]:
            log.warning("run %s keeps its own weights: this fit's model begins with others", run_id)
        elif different:
            raise refuse_run(run_id, f"with another {different[0]} than this fit's")

    def load_manifest(self) -> Manifest:
        """The manifest of the rows that are trained on. Raises StoreError if it was altered."""
        return Manifest.from_json(self.rows.manifest)

    def build_plan(self, manifest: Manifest) -> DataPlan:
        return self._plan_rows(manifest, self.rows, self.settings["shuffle"])

    def load_validation(self) -> tuple[Manifest, DataPlan] | None:
        """The validation rows and their plan; None: there are none."""
        if self.validation is None:
            return None
        manifest = Manifest.from_json(self.validation.manifest)
        return manifest, self._plan_rows(manifest, self.validation, shuffle=False)

    def _plan_rows(self, manifest: Manifest, rows: RowRecord, shuffle: bool) -> DataPlan:
        settings = self.settings
        shares = settings.get("virtual_shares", 0) if settings.get("determinism") else 0
        seed, lanes = settings["seed"], rows.lanes
        return DataPlan(manifest.group_rows, rows.global_batch, seed, lanes, shuffle, shares)

    def count_initial_workers(self) -> int:
        """`num_workers` of the fit that began the run; a later fit may have another number."""
        rows: int = self.settings["batch_size"] * self.settings["backward_passes_per_step"]
        return self.rows.global_batch // rows


def plan_rows(request: Request, manifest: Manifest, global_batch: int, shuffle: bool) -> DataPlan:
    decoded, config = manifest.max_decoded_group_bytes(), request.config
    seed, most, limit = config.data.seed, config.world.max_workers, DEFAULT_CACHE_BYTES
    plan = DataPlan.for_run(manifest.group_rows, global_batch, seed, most, decoded, limit, shuffle)
    lanes = plan.lanes
    if config.data.lanes is not None:
        lanes = min(config.data.lanes, plan.base_rows, count_affordable_lanes(decoded, limit))
    return replace(plan, lanes=lanes, shares=config.exchange.shares)


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run."""

    model: str  # name of the trained weights in the store
    sha256: str  # SHA-256 of that object
    digest: str  # checksum of weights and optimizer, equal on all replicas
    epochs: int  # that the run was to have; callbacks may have ended it sooner
    history: list[dict[str, Any]]  # one dict for each epoch
    data_rows: int  # rows of the training table

    @classmethod
    def load(cls, store: Store, run_id: str) -> RunResult | None:
        """None while the run has not ended."""
        name = f"runs/{run_id}/result.json"
        if not store.exists(name):
            return None
        name_there = f"{name} in the store {store.url}"
        return parse_document(store.read_bytes(name), name_there, lambda fields: codec.read(cls, fields))

    def save(self, store: Store, run_id: str) -> None:
        store.write_bytes(f"runs/{run_id}/result.json", json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class FoundRows:
    """Rows that are read where they are, decided once where the request is checked."""

    store: Store  # that has the files
    rows: Manifest  # what is trained on
    validation: Manifest | None  # what is validated with after each epoch; None: nothing
    place: str  # where they are, as the run's record has it
    source: str  # what they are of, for people, such as the version of a table
    any_version: bool = False  # whether a resumed run keeps the version of the table that it began with


class RowSource(ABC):
    """Where the rows of a fit come from. Nothing is written or removed of those that `check` has found."""

    session: SparkSession
    found: FoundRows | None = None  # by `check`; None: the rows are to be written

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raises InvalidInput if the columns do not fit the request; starts no job but one for many files' footers."""

    def are_written_soon(self) -> bool:
        """Whether rows have to be written, and that takes a few seconds."""
        return False

    def has_validation(self, request: Request) -> bool:
        """Whether there are rows to validate with after each epoch."""
        return request.config.data.validation is not None

    def describe(self, record: RunRecord) -> str:
        """The rows of a run in words, such as the version of a table."""
        found = self._require_found()
        is_same = record.load_manifest() == found.rows
        return found.source if is_same else f"a version older than {found.source}"

    def check_same_rows(self, request: Request, record: RunRecord, run_id: str) -> None:
        """Raises InvalidInput if the run began with other rows (R19, resuming a run); may start a job."""
        found, manifest, before = self._require_found(), record.load_manifest(), record.load_validation()
        if found.any_version and record.data == found.place:
            if manifest.fingerprint != found.rows.fingerprint:
                raise refuse_run(run_id, "with other values of columns or where than this fit's")
        elif (manifest, before and before[0]) != (found.rows, found.validation):
            raise refuse_run(run_id, f"with other files than those now in {found.place}, or on a table")

    def begin_run(self, request: Request, store: Store, run: OwnedRun) -> RunRecord:
        """Save the record of a new run, once its rows are where the workers read them."""
        found = self._require_found()
        record = RunRecord.create(request, found.place, found.rows, found.validation)
        run.check()
        record.save(store, run.run_id)
        return record

    def open_data(self, store: Store, record: RunRecord) -> Store:
        """The store that the rows of a run are in. store: of the run."""
        return self._require_found().store

    def _require_found(self) -> FoundRows:
        assert self.found is not None
        return self.found


@dataclass
class FileRows(RowSource):
    """The rows of Parquet files, or of one version of a table, whatever is written to it meanwhile."""

    session: SparkSession
    call: str  # the method, as the user knows it
    argument: str  # its argument that gives rows to validate with
    store: Store  # that has the files
    parts: Sequence[Callable[..., Manifest]]  # describe the rows to train on, and to validate with
    place: str  # as in `FoundRows`, as are the next two
    source: str
    any_version: bool = False

    def check(self, request: Request) -> None:
        """Also reads the files' footers, by a Spark job if there are many."""
        data = request.config.data
        conversion = find_conversion(request)
        if conversion is not None:
            remedy = conversion[1].format(argument=self.argument)
            raise InvalidInput(f"{conversion[0]}; {self.call} reads files as they are: {remedy}.")
        if data.reader != "arrow" and self.call == "fit_on_table":
            raise InvalidInput(
                f"reader={data.reader!r} knows neither renamed columns nor deleted rows, which tables have: "
                "fit_on_table needs reader='arrow'."
            )
        options: dict[str, Any] = {
            "transformed": request.objects.transformation is not None,
            "piece_bytes": choose_group_bytes(request),
            "collect": make_footer_collector(self.session),
        }
        rows, *others = [describe(columns=data.used_cols, **options) for describe in self.parts]
        validation = None
        if others:
            rows, validation = align_ragged(rows, others[0]), align_ragged(others[0], rows)
            _check_equal_columns(rows, validation, self.argument)
        self.found = FoundRows(self.store, rows, validation, self.place, self.source, self.any_version)

    def has_validation(self, request: Request) -> bool:
        return len(self.parts) > 1


@dataclass
class HandleRows(RowSource):
    """The rows of `Rows`, which were described when the handle was made."""

    session: SparkSession
    rows: RowHandle

    def check(self, request: Request) -> None:
        data, handle = request.config.data, self.rows
        conversion = find_conversion(request, splits=False, checks_nan=not handle.has_no_nan)
        if conversion is not None:
            raise InvalidInput(f"{conversion[0]}, and Rows are read as they are: {conversion[1]}.")
        parts = [handle] if data.validation is None else handle.split(data.validation, data.seed)
        rows, *others = [part.select(*data.used_cols).manifest for part in parts]
        for column in rows.columns if request.objects.transformation is None else ():
            if column.is_raw:
                numbers = "pass transformation_fn, which makes numbers of them"
                remedy = format_remedy(1) if column.ragged else numbers
                raise InvalidInput(f"The column {column.name!r} has {column.kind}: {remedy}.")
        validation = others[0] if others else None
        self.found = FoundRows(handle.store, rows, validation, handle.store.url, handle.source)


def require_session(session: SparkSession | None) -> SparkSession:
    """Raises InvalidInput if there is none."""
    if session is None:
        raise InvalidInput("There is no active Spark session: create one, as for `fit`.")
    return session


def locate_rows(
    session: SparkSession | None, paths: Sequence[str], validation_paths: Sequence[str], options: Options
) -> FileRows:
    """The rows of `fit_on_parquet`. Raises InvalidInput without a session or a path, and for several file systems."""
    known = require_session(session)
    files, names = locate_files([*paths, *validation_paths] if paths else (), options)
    divided = names[: len(paths)], names[len(paths) :]
    parts = [partial(describe_parquet, files, names=each) for each in divided if each]
    source = f"Parquet files in {files.url}"
    return FileRows(known, "fit_on_parquet", "validation_paths", files, parts, files.url, source)


@dataclass(frozen=True)
class Selection:
    """What is trained on of a table."""

    columns: Mapping[str, str]  # the estimator's name of a column -> the table's, where they differ
    where: Predicate | None  # which rows; None: all

    @classmethod
    def parse(cls, columns: Any, where: Any) -> Selection:
        """Raises InvalidInput if they are no dict of names and no comparisons."""
        given = {} if columns is None else columns
        if not isinstance(given, Mapping) or not all(
            isinstance(each, str) for each in [*given, *given.values()]
        ):
            raise InvalidInput(
                "columns must be a dict from the names that feature_cols and the like have to those in the table; "
                f"got {columns!r}."
            )
        return cls(dict(given), Predicate.parse(where))

    def describe(
        self,
        snapshot: TableSnapshot,
        store: Store,
        files: Sequence[DataFile],
        columns: Sequence[str],
        **options: Any,
    ) -> Manifest:
        """The rows of a table that match `where`. store, files: that the snapshot's files are in, by their names there.
        columns, options: of `describe_files`."""
        for own in self.columns.values():
            if own not in snapshot.columns:
                raise InvalidInput(
                    f"columns names {own!r}, which {snapshot.name} does not have: it has "
                    f"{format_columns(own, snapshot.columns)}."
                )
        if self.columns:
            compared = [] if self.where is None else self.where.columns
            names = {name: self.columns.get(name, name) for name in [*columns, *compared]}
            files = [file.rename_columns(names) for file in files]
        try:
            found = describe_files(store, files, columns, where=self.where, **options)
        except StoreError as error:
            raise StoreError(
                f"A file of {snapshot.name} cannot be read; if the table was vacuumed, fit on a newer "
                f"version: {error}"
            ) from error
        return replace(found, fingerprint=self.digest)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr((sorted(self.columns.items()), self.where)).encode()).hexdigest()[:32]


def open_table_rows(
    session: SparkSession | None,
    table: Any,
    version: Version | None,
    validation_table: Any,
    storage_options: Options,
    selection: Selection,
) -> FileRows:
    """The rows of `fit_on_table`. selection: of the table; the one to validate with has the same columns, and all of
    its rows count. Raises InvalidInput as `read_snapshot` does, and without a session."""
    if table is None:
        raise InvalidInput(
            "fit_on_table takes a table's name, path, url or object; got None: name the table to train on."
        )
    known = require_session(session)
    tables = [(table, version), (validation_table, None)][: 1 if validation_table is None else 2]
    snapshots = [read_snapshot(*_find_table(known, *each), storage_options) for each in tables]
    store, files = join_stores(snapshots)
    selections = (selection, replace(selection, where=None))
    parts = [
        partial(chosen.describe, snapshot, store, own)
        for chosen, snapshot, own in zip(selections, snapshots, files, strict=False)
    ]
    # The url of each table: the store that holds both is a folder that may hold others, too.
    place = " and ".join(each.store.url for each in snapshots)
    source, any_version = snapshots[0].name, version is None
    return FileRows(known, "fit_on_table", "validation_table", store, parts, place, source, any_version)


def list_names(columns: Any, known: Sequence[str]) -> list[str]:
    """The names of columns that `Rows` are to have; None: all. Raises InvalidInput if they are no names."""
    if columns is None:
        return list(known)
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise InvalidInput(f"columns must be a list of names; got {columns!r}.")
    for name in columns:
        if name not in known:
            raise InvalidInput(
                f"columns names {name!r}, which is not there: there are {format_columns(str(name), list(known))}."
            )
    return list(dict.fromkeys(columns))


def describe_paths(
    paths: Any, columns: Sequence[str] | None, storage_options: Options
) -> tuple[Store, Manifest, str]:
    """The fields of `Rows.from_parquet`."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files, names = locate_files([str(each) for each in given], storage_options)
    wanted = list_names(columns, list_parquet_columns(files, names))
    manifest = describe_parquet(files, wanted, transformed=True, names=names, collect=_choose_collector())
    return files, manifest, f"Parquet files in {files.url}"


def describe_table(
    table: Any, version: Version | None, columns: Any, where: Any, storage_options: Options
) -> tuple[Store, Manifest, str]:
    """The fields of `Rows.from_table`."""
    session = find_session()
    if session is not None:
        table, version = _find_table(session, table, version)
    snapshot = read_snapshot(table, version, storage_options)
    store, files = snapshot.store, snapshot.files
    if not files:
        raise InvalidInput(f"{snapshot.name} has no rows.")
    renamed = columns if isinstance(columns, Mapping) else None
    names = list(renamed or list_names(columns, list_columns(store, files[0], snapshot.columns)))
    options: dict[str, Any] = {"transformed": True, "collect": _choose_collector()}
    manifest = Selection.parse(renamed, where).describe(snapshot, store, files, names, **options)
    return store, manifest, snapshot.name


def _choose_collector() -> CollectFooters:
    session = find_session()
    return collect_footers_in_threads if session is None else make_footer_collector(session)


def _find_table(session: SparkSession, table: Any, version: Version | None) -> tuple[Any, Version | None]:
    """What `read_snapshot` takes, for a table that Spark's catalog knows by its name."""
    # Spark raises an error for what is no name, such as that of a relative folder.
    is_name = isinstance(table, str) and _TABLE_NAME.fullmatch(table)
    if not is_name or not session.catalog.tableExists(table):
        return table, version
    described = session.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    facts = {row["col_name"]: row["data_type"] for row in described}
    if facts.get("Provider") == "iceberg" and version is None:
        # The catalog decides which of the metadata files counts.
        properties = session.sql(f"SHOW TBLPROPERTIES {table}").collect()
        current = {row["key"]: row["value"] for row in properties}["current-snapshot-id"]
        version = None if current == "none" else int(current)  # of an empty table
    location = facts.get("Location")
    if location is None:
        raise InvalidInput(
            f"{table} is a view, of which there are no versions: fit on spark.table({table!r}), or name its table."
        )
    return location.removeprefix("file:") if location.startswith("file:/") else location, version


def find_conversion(request: Request, splits: bool = True, checks_nan: bool = True) -> tuple[str, str] | None:
    """What was asked for that only the writing of rows can do, as a clause, and what to do instead; None: nothing.
    splits: whether a validation split is one. checks_nan: whether nobody has looked for NaN yet."""
    data, has_check = request.config.data, request.config.loss.terminate_on_nan
    if splits and data.validation is not None:
        return "validation splits the rows while they are written", "give {argument} instead"
    without = "" if has_check or not checks_nan else "missing={'nans': 'keep'} or terminate_on_nan=True"
    return find_conversion_of_rows(request.missing, data.row_order, without)


def find_conversion_of_rows(
    missing: MissingValues, row_order: str | None, without_nan_check: str
) -> tuple[str, str] | None:
    """The same of these parameters. without_nan_check: settings by which nobody has to look for NaN; "": nobody has."""
    if "drop" in (missing.nulls, missing.nans):
        return "missing leaves out rows while they are written", "use fit, or write the files without them"
    if row_order == "hash":
        clause = "the order of their hash sorts the rows while they are written"
        return clause, "leave row_order out, or use fit"
    if missing.nans == "refuse" and without_nan_check:
        clause = "NaN is looked for while rows are written"
        return f"{clause} ({without_nan_check} does without)", "set one of these"
    return None


def choose_group_bytes(request: Request) -> int:
    """Decoded bytes of a row group, or of a piece of one, so that those of all lanes fit into a worker's memory."""
    lanes = request.config.data.lanes
    # Row groups of less than twice that are left whole.
    return PIECE_BYTES if lanes is None else min(PIECE_BYTES, DEFAULT_CACHE_BYTES // (2 * (lanes + 2)))


@contextmanager
def materialize_rows(
    rows: RowSource, request: Request, store: Store, run: OwnedRun
) -> Iterator[tuple[RunRecord, Store]]:
    """The run's record, and the store that its rows are in, for as long as the run needs them: if it is resumed, those
    that it began with. Written rows are deleted after the block, unless it fails and the run can be resumed."""
    record = RunRecord.load(store, run.run_id)
    if record is None:
        record = rows.begin_run(request, store, run)
    else:
        rows.check_same_rows(request, record, run.run_id)
    folder = "" if record.is_on_files else record.data
    try:
        yield record, rows.open_data(store, record)
    except BaseException as error:
        if _is_resumable(request, store, run, error):
            log.warning("run %s can be resumed: fit again with run_id=%r", run.run_id, run.run_id)
        else:
            run.delete_run(folder)
        raise
    run.delete_objects(folder)


def _is_resumable(request: Request, store: Store, run: OwnedRun, error: BaseException) -> bool:
    """Whether the failed run has a checkpoint, or hosts may keep its state: R23 (kept commits). They do after a loss of
    Spark or of a coordinator, and where an earlier driver was lost and this one's job did not begin."""
    began_no_job = run.attempt > 1 and not hasattr(error, "report")  # which errors of jobs have
    is_driver_lost = isinstance(error, CoordinatorLost) or SPARK_STOPPED in str(error) or began_no_job
    if is_driver_lost and request.run_id and request.elastic.keep_commits:
        return True
    try:
        return request.store is not None and bool(CheckpointStore(store, run.run_id).read_published())
    except StoreError:
        return True  # the store does not answer: nothing is deleted


def _check_equal_columns(rows: Manifest, validation: Manifest, argument: str) -> None:
    """Columns to validate with may have another precision, but no other kind or shape."""
    for one, other in zip(rows.columns, validation.columns, strict=True):
        if (_classify_number(one), one.shape) != (_classify_number(other), other.shape):
            raise InvalidInput(
                f"column {one.name!r} is {other.dtype} of shape {other.shape} in {argument}, and {one.dtype} of "
                f"shape {one.shape} in the files that are trained on: write them alike."
            )


def _classify_number(column: Column) -> str:
    return np.dtype(column.element[0]).kind.replace("u", "i")
