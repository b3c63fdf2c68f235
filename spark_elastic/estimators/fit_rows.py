"""The rows of a fit: where they are, and what a run keeps of them. Those of a DataFrame are in `dataframe_rows.py`.

Decides which rows train and which validate, and deletes written rows once no run needs them. Runs in the caller's
thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

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
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.runs.owned_run import OwnedRun
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
from spark_elastic.training.identity import WEIGHTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("spark_elastic")

Request = FitRequest[Any]
FORMAT = 4  # of run.json


@dataclass(frozen=True)
class RunRecord:
    """Everything that stays the same when a run is resumed, whatever the number of workers then is."""

    # Where the rows are: a folder of the store ("": its root), or the url of existing files, or those of two tables.
    data: str
    manifest: str  # the manifest of the rows that are trained on, as JSON
    manifest_hash: str  # its `Manifest.hash`; `load_manifest` compares it
    global_batch: int  # rows of one step
    lanes: int  # streams that an epoch is cut into
    settings: Mapping[str, Any]  # the parameters that must stay the same
    # manifest, global_batch and lanes of the rows that are validated with; None: there are none.
    validation: Mapping[str, Any] | None
    objects: Mapping[str, str]  # digests of the user's objects, by the names that an error has for them
    format: int = FORMAT  # of this record; a release reads its own alone

    @classmethod
    def create(cls, request: Request, data: str, rows: Manifest, validation: Manifest | None) -> RunRecord:
        """The record of a new run on these rows, which are in `data`."""
        config = request.config
        plan, seen = plan_rows(request, rows, config.global_batch, config.data.shuffle), None
        if validation is not None:
            batch = config.data.validation_batch * config.world.num_workers
            order = plan_rows(request, validation, batch, shuffle=False)
            numbers = {"global_batch": order.global_batch, "lanes": order.lanes}
            seen = {"manifest": validation.to_json(), **numbers}
        return cls(
            data=data,
            manifest=rows.to_json(),
            manifest_hash=rows.hash,
            global_batch=plan.global_batch,
            lanes=plan.lanes,
            settings=config.list_run_settings(),
            validation=seen,
            objects=request.objects.identity(),
        )

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
            if record.validation is not None:
                itemgetter("manifest", "global_batch", "lanes")(record.validation)
            return record

        return parse_document(store.read_bytes(name), f"{name} in the store {store.url}", read)

    def save(self, store: Store, run_id: str) -> None:
        store.write_bytes(f"runs/{run_id}/run.json", json.dumps(asdict(self)).encode())

    def check(self, request: Request, run_id: str) -> None:
        """Raises InvalidInput with the first setting, or object of the user's, that differs."""
        for name, value in request.config.list_run_settings().items():
            before = self.settings.get(name, value)  # a parameter may be newer than the run
            if before != value:
                raise InvalidInput(
                    f"run_id {run_id!r} began with {name}={before!r} and this fit has {value!r}: "
                    "continue with the same, or use another run_id."
                )
        now = request.objects.identity() if self.objects else {}
        different = [name for name, before in self.objects.items() if now.get(name) != before]
        if different == [WEIGHTS]:
            log.warning("run %s keeps its own weights: this fit's model begins with others", run_id)
        elif different:
            raise InvalidInput(
                f"run_id {run_id!r} began with another {different[0]} than this fit's: continue with the same, or use "
                "another run_id."
            )

    def load_manifest(self) -> Manifest:
        """The manifest of the rows that are trained on. Raises StoreError if the document was altered."""
        manifest = Manifest.from_json(self.manifest)
        if manifest.hash != self.manifest_hash:
            raise StoreError("The run's manifest is not the one that it began with: it was altered.")
        return manifest

    def build_plan(self, manifest: Manifest) -> DataPlan:
        return self._plan_rows(manifest, self.global_batch, self.lanes, self.settings["shuffle"])

    def load_validation(self) -> tuple[Manifest, DataPlan] | None:
        """The validation rows and their plan; None: there are none."""
        if self.validation is None:
            return None
        manifest = Manifest.from_json(self.validation["manifest"])
        batch, lanes = self.validation["global_batch"], self.validation["lanes"]
        return manifest, self._plan_rows(manifest, batch, lanes, shuffle=False)

    def _plan_rows(self, manifest: Manifest, global_batch: int, lanes: int, shuffle: bool) -> DataPlan:
        settings = self.settings
        shares = settings.get("virtual_shares", 0) if settings.get("determinism") else 0
        return DataPlan(manifest.group_rows, global_batch, settings["seed"], lanes, shuffle, shares)

    def count_initial_workers(self) -> int:
        """`num_workers` of the fit that began the run; a later fit may have another number."""
        rows: int = self.settings["batch_size"] * self.settings["backward_passes_per_step"]
        return self.global_batch // rows


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


log = logging.getLogger("spark_elastic")

# Parts that are words, or anything but a slash in backquotes.
_TABLE_NAME = re.compile(r"(?:\w+|`[^/]+`)(?:\.(?:\w+|`[^/]+`))*")


@dataclass(frozen=True)
class FoundRows:
    """Rows that are read where they are, decided once where the request is checked."""

    store: Store  # that has the files
    rows: Manifest  # what is trained on
    validation: Manifest | None  # what is validated with after each epoch; None: nothing
    place: str  # where they are, as the run's record has it
    source: str  # what they are of, for people, such as the version of a table


class RowSource(ABC):
    """Where the rows of a fit come from. Nothing is written or removed of those that `check` has found."""

    session: SparkSession
    found: FoundRows | None = None  # by `check`; None: the rows are to be written

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raises InvalidInput if the columns do not fit the request; starts no job but one for many files' footers."""

    def has_validation(self, request: Request) -> bool:
        """Whether there are rows to validate with after each epoch."""
        return request.config.data.validation is not None

    def describe(self, record: RunRecord) -> str:
        """The rows of a run in words, such as the version of a table."""
        return self._require_found().source

    def check_same_rows(self, request: Request, record: RunRecord, run_id: str) -> None:
        """Raises InvalidInput if the run began with other rows (R19, resuming a run); may start a job."""
        found, before = self._require_found(), record.load_validation()
        if (record.load_manifest(), None if before is None else before[0]) != (found.rows, found.validation):
            raise InvalidInput(
                f"run_id {run_id!r} began with other files than those now in {found.place}, or on a table: bring "
                "them back, or use another run_id."
            )

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


class FileRows(RowSource):
    """The rows of Parquet files; `check` describes them once."""

    # As the user knows them: the method, and the argument that gives rows to validate with.
    call, validation_argument = "fit_on_parquet", "validation_paths"

    def __init__(
        self, session: SparkSession | None, files: Store, names: Sequence[str], seen: Sequence[str]
    ) -> None:
        """files: the store that holds all of them. names: of files or folders in it, to train on; seen: to validate."""
        self.session = require_session(session)
        self._files, self._names, self._validation_names = files, names, seen

    @classmethod
    def locate(
        cls,
        session: SparkSession | None,
        paths: Sequence[str],
        validation_paths: Sequence[str],
        storage_options: Mapping[str, Any],
    ) -> FileRows:
        """Raises InvalidInput without a session or a path, and for several file systems."""
        require_session(session)
        files, names = _locate_files(paths, validation_paths, storage_options)
        return cls(session, files, names[: len(paths)], names[len(paths) :])

    def check(self, request: Request) -> None:
        """Also reads the files' footers, by a Spark job if there are many."""
        conversion = find_fit_conversion(request)
        if conversion is not None:
            clause, remedy = conversion[0], conversion[1].format(argument=self.validation_argument)
            raise InvalidInput(f"{clause}; {self.call} reads files as they are: {remedy}.")
        options = {
            "columns": request.config.data.used_cols,
            "transformed": request.objects.transformation is not None,
            "piece_bytes": choose_group_bytes(request),
            "collect": make_footer_collector(self.session),
        }
        rows, validation = self._describe(options)
        if validation is not None:
            rows, validation = align_ragged(rows, validation), align_ragged(validation, rows)
        _check_equal_columns(rows, validation, self.validation_argument)
        place, source = self._name()
        self.found = FoundRows(self._files, rows, validation, place, source)

    def has_validation(self, request: Request) -> bool:
        return bool(self._validation_names)

    def _name(self) -> tuple[str, str]:
        """Where the rows are, and what they are of."""
        return self._files.url, f"Parquet files in {self._files.url}"

    def _describe(self, options: Mapping[str, Any]) -> tuple[Manifest, Manifest | None]:
        """The rows to train on, and those to validate with. options: of `describe_parquet` and `describe_files`."""
        seen = self._validation_names
        rows = describe_parquet(self._files, names=self._names, **options)
        return rows, describe_parquet(self._files, names=seen, **options) if seen else None


def require_session(session: SparkSession | None) -> SparkSession:
    """Raises InvalidInput if there is none."""
    if session is None:
        raise InvalidInput("There is no active Spark session: create one, as for `fit`.")
    return session


def _locate_files(
    paths: Sequence[str], others: Sequence[str], storage_options: Mapping[str, Any]
) -> tuple[Store, tuple[str, ...]]:
    """As `locate_files`, of both. Raises InvalidInput if there are no `paths`."""
    if not paths:
        raise InvalidInput("paths is empty: name a Parquet file or a folder.")
    return locate_files([*paths, *others], storage_options)


@dataclass(frozen=True)
class Selection:
    """What is trained on of a table."""

    # Name of a column for the estimator -> its name in the table, where they differ.
    columns: Mapping[str, str]
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

    def rename(self, file: DataFile, used: Sequence[str]) -> DataFile:
        """The file with the columns that are used, under the estimator's names."""
        if not self.columns:
            return file
        compared = [] if self.where is None else self.where.columns
        return file.rename_columns({name: self.columns.get(name, name) for name in [*used, *compared]})

    def describe(
        self,
        store: Store,
        files: Sequence[DataFile],
        where: Predicate | None,
        columns: Sequence[str],
        **options: Any,
    ) -> Manifest:
        """The rows of a table's files that match `where`. columns, options: of `describe_files`."""
        parts = [self.rename(file, columns) for file in files]
        found = describe_files(store, parts, columns, where=where, **options)
        return dataclasses.replace(found, fingerprint=self.digest)

    def check(self, snapshot: TableSnapshot) -> None:
        """Raises InvalidInput for a name in `columns` or `where` that the table does not have."""
        for own in self.columns.values():
            if own not in snapshot.columns:
                raise InvalidInput(
                    f"columns names {own!r}, which {snapshot.name} does not have: it has "
                    f"{format_columns(own, snapshot.columns)}."
                )
        given = {own: name for name, own in self.columns.items()}
        names = [given.get(own, own) for own in snapshot.single]
        for name in () if self.where is None else self.where.columns:
            own = self.columns.get(name, name)
            if own not in snapshot.single:
                fault = "has as arrays or records" if own in snapshot.columns else "does not have"
                raise InvalidInput(
                    f"where compares column {name!r}, which {snapshot.name} {fault}: compare one of "
                    f"{format_columns(name, names)}."
                )

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr((sorted(self.columns.items()), self.where)).encode()).hexdigest()[:32]


class SnapshotRows(FileRows):
    """The rows of one version of a table, whatever is written to the table meanwhile."""

    call, validation_argument = "fit_on_table", "validation_table"

    def __init__(
        self,
        session: SparkSession | None,
        snapshot: TableSnapshot,
        validation: TableSnapshot | None,
        is_newest: bool,
        selection: Selection,
    ) -> None:
        """is_newest: no version was asked for, so that a resumed run takes the one that it began with. selection: of
        the first table; the one to validate with has the same columns, and all of its rows count."""
        snapshots = [snapshot] if validation is None else [snapshot, validation]
        files, self._parts = join_stores(snapshots)
        super().__init__(session, files, (), ())
        self._snapshots, self._is_newest, self._selection = snapshots, is_newest, selection

    @classmethod
    def open(
        cls,
        session: SparkSession | None,
        table: Any,
        version: Version | None,
        validation_table: Any,
        storage_options: Mapping[str, Any],
        selection: Selection,
    ) -> SnapshotRows:
        """Raises InvalidInput as `read_snapshot` does, and without a session."""
        if table is None:
            raise InvalidInput(
                "fit_on_table takes a table's name, path, url or object; got None: name the table to train on."
            )
        known = require_session(session)
        snapshot, validation = (
            None if each is None else read_snapshot(*_find_table(known, each, number), storage_options)
            for each, number in ((table, version), (validation_table, None))
        )
        assert snapshot is not None
        return cls(session, snapshot, validation, version is None, selection)

    def has_validation(self, request: Request) -> bool:
        return len(self._snapshots) > 1

    def check(self, request: Request) -> None:
        reader = request.config.data.reader
        if reader != "arrow":
            raise InvalidInput(
                f"reader={reader!r} knows neither renamed columns nor deleted rows, which tables have: {self.call} "
                "needs reader='arrow'."
            )
        super().check(request)

    def describe(self, record: RunRecord) -> str:
        found = self._require_found()
        if record.load_manifest() == found.rows:
            return found.source
        return f"a version older than {found.source}"  # with which the run began

    def check_same_rows(self, request: Request, record: RunRecord, run_id: str) -> None:
        if not (self._is_newest and record.data == self._require_found().place):
            super().check_same_rows(request, record, run_id)
        elif record.load_manifest().fingerprint != self._selection.digest:
            raise InvalidInput(
                f"run_id {run_id!r} began with other values of columns or where than this fit's: continue with the "
                "same, or use another run_id."
            )

    def _name(self) -> tuple[str, str]:
        # The url of each table: the store that holds both is a folder that may hold others, too.
        return " and ".join(each.store.url for each in self._snapshots), self._snapshots[0].name

    def _describe(self, options: Mapping[str, Any]) -> tuple[Manifest, Manifest | None]:
        self._selection.check(self._snapshots[0])
        described: list[Manifest] = []
        for snapshot, files in zip(self._snapshots, self._parts, strict=True):
            where = None if described else self._selection.where
            try:
                described.append(self._selection.describe(self._files, files, where, **options))
            except StoreError as error:
                raise StoreError(
                    f"A file of {snapshot.name} cannot be read; if the table was vacuumed, fit on a newer "
                    f"version: {error}"
                ) from error
        return described[0], described[1] if len(described) > 1 else None


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
    paths: Any, columns: Sequence[str] | None, storage_options: Mapping[str, Any]
) -> tuple[Store, Manifest, str]:
    """The fields of `Rows.from_parquet`."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files, names = _locate_files([str(each) for each in given], (), storage_options)
    wanted = list_names(columns, list_parquet_columns(files, names))
    manifest = describe_parquet(files, wanted, transformed=True, names=names, collect=_choose_collector())
    return files, manifest, f"Parquet files in {files.url}"


def describe_table(
    table: Any, version: Version | None, columns: Any, where: Any, storage_options: Mapping[str, Any]
) -> tuple[Store, Manifest, str]:
    """The fields of `Rows.from_table`."""
    session = find_session()
    if session is not None:
        table, version = _find_table(session, table, version)
    snapshot = read_snapshot(table, version, storage_options)
    renamed = columns if isinstance(columns, Mapping) else None
    selection = Selection.parse(renamed, where)
    selection.check(snapshot)
    if not snapshot.files:
        raise InvalidInput(f"{snapshot.name} has no rows.")
    readable = list_columns(snapshot.store, snapshot.files[0], snapshot.columns)
    names = list(renamed) if renamed else list_names(columns, readable)
    options = {"transformed": True, "collect": _choose_collector()}
    manifest = selection.describe(snapshot.store, snapshot.files, selection.where, names, **options)
    return snapshot.store, manifest, snapshot.name


def _choose_collector() -> CollectFooters:
    session = find_session()
    return collect_footers_in_threads if session is None else make_footer_collector(session)


class HandleRows(RowSource):
    """The rows of `Rows`, which were described when the handle was made."""

    def __init__(self, session: SparkSession, rows: RowHandle) -> None:
        self.session, self._rows = session, rows

    def check(self, request: Request) -> None:
        config = request.config
        avoids = "" if self._rows.has_no_nan else _avoid_nan_check(request)
        conversion = find_conversion(request.missing, config.data.row_order, avoids_nan_check=avoids)
        if conversion is not None:
            clause, remedy = conversion[0], conversion[1].format(argument="validation")
            raise InvalidInput(f"{clause}, and Rows are read as they are: {remedy}.")
        rest, held_out = self._rows, None
        if config.data.validation is not None:
            rest, held_out = rest.split(config.data.validation, config.data.seed)
        parts = [
            None if each is None else each.select(*config.data.used_cols).manifest
            for each in (rest, held_out)
        ]
        assert parts[0] is not None
        for column in parts[0].columns if request.objects.transformation is None else ():
            if column.is_raw:
                numbers = "pass transformation_fn, which makes numbers of them"
                remedy = format_remedy(1) if column.ragged else numbers
                raise InvalidInput(f"The column {column.name!r} has {column.kind}: {remedy}.")
        self.found = FoundRows(self._rows.store, parts[0], parts[1], self._rows.store.url, self._rows.source)


def _find_table(session: SparkSession, table: Any, version: Version | None) -> tuple[Any, Version | None]:
    """What `read_snapshot` takes, for a table that Spark's catalog knows by its name."""
    # Spark raises an error for what is no name, such as that of a relative folder.
    if (
        not isinstance(table, str)
        or not _TABLE_NAME.fullmatch(table)
        or not session.catalog.tableExists(table)
    ):
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
            f"{table} is a view, of which there are no versions: fit on spark.table({table!r}), or name the table that "
            "it selects from."
        )
    return location.removeprefix("file:") if location.startswith("file:/") else location, version


def find_conversion(
    missing: MissingValues, row_order: str | None, validation: Any = None, avoids_nan_check: str = ""
) -> tuple[str, str] | None:
    """What was asked for that only the writing of rows can do, as a clause, and what to do instead; None: nothing.
    avoids_nan_check: settings by which nobody has to look for NaN; "": nobody has to."""
    if validation is not None:
        return "validation splits the rows while they are written", "give {argument} instead"
    if "drop" in (missing.nulls, missing.nans):
        return "missing leaves out rows while they are written", "use fit, or write the files without them"
    if row_order == "hash":
        return (
            "the order of their hash sorts the rows while they are written",
            "leave row_order out, or use fit",
        )
    if missing.nans == "refuse" and avoids_nan_check:
        clause = "NaN is looked for while rows are written"
        return f"{clause} ({avoids_nan_check} does without)", "set one of these"
    return None


def find_fit_conversion(request: Request) -> tuple[str, str] | None:
    config = request.config
    return find_conversion(
        request.missing, config.data.row_order, config.data.validation, _avoid_nan_check(request)
    )


def _avoid_nan_check(request: Request) -> str:
    return "" if request.config.loss.terminate_on_nan else "missing={'nans': 'keep'} or terminate_on_nan=True"


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
    that it began with."""
    record = RunRecord.load(store, run.run_id)
    if record is None:
        record = rows.begin_run(request, store, run)
    else:
        rows.check_same_rows(request, record, run.run_id)
    with delete_rows_after_run(request, store, run, "" if record.is_on_files else record.data):
        yield record, rows.open_data(store, record)


@contextmanager
def delete_rows_after_run(request: Request, store: Store, run: OwnedRun, folder: str) -> Iterator[None]:
    """Delete the rows in `folder` ("": none) after the block, unless it fails and the run can be resumed."""
    try:
        yield
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


def _check_equal_columns(rows: Manifest, validation: Manifest | None, argument: str) -> None:
    """Columns to validate with may have another precision, but no other kind or shape."""
    if validation is None:
        return
    for one, other in zip(rows.columns, validation.columns, strict=True):
        if (_classify_number(one), one.shape) != (_classify_number(other), other.shape):
            raise InvalidInput(
                f"column {one.name!r} is {other.dtype} of shape {other.shape} in {argument}, and {one.dtype} of "
                f"shape {one.shape} in the files that are trained on: write them alike."
            )


def _classify_number(column: Column) -> str:
    return np.dtype(column.element[0]).kind.replace("u", "i")
