"""The rows of a fit: written to the store, held for its run, and let go.

Owns which rows train and which validate. Runs in the caller's thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_elastic.data.decoded_groups import DEFAULT_CACHE_BYTES
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.run_record import Planned, RunRecord
from spark_elastic.estimators.validation import Request
from spark_elastic.spark.materialize import Split, Writing, materialize, materialize_split
from spark_elastic.state import attempts
from spark_elastic.state.checkpoint import Checkpoints
from spark_elastic.state.held_run import HeldRun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("spark_elastic")


def check_validation(df: DataFrame, request: Request) -> None:
    """InvalidInput where `validation` names a column that is not there; starts no job."""
    if isinstance(request.validation, str) and request.validation not in df.columns:
        raise InvalidInput(
            f"validation names the column {request.validation!r}, which the table has not; it has: "
            f"{', '.join(df.columns)}."
        )


@contextmanager
def held_rows(
    df: DataFrame, request: Request, store: Store, run: HeldRun
) -> Iterator[tuple[RunRecord, Store]]:
    """The columns in the store: for all fits to come (`keep_data`), or in a folder of the run until it has ended well.

    A run that goes on goes on with the rows that it was begun with.
    """
    own = "" if request.keep_data else f"runs/{run.run_id}/rows"
    record = RunRecord.load(store, run.run_id)
    if record is None:
        try:
            manifest, seen = _written(df, request, _inside(store, own))
            record = RunRecord.of(request, own, (manifest, _plan(request, manifest)), seen)
        except BaseException:
            _forget_rows(store, own)
            attempts.forget(store, run.run_id, run.attempt)
            raise
        record.save(store, run.run_id)
    try:
        yield record, _inside(store, record.data)
    except BaseException:
        if _goes_on(request, store, run.run_id):
            log.warning("run %s can go on: fit again with run_id=%r", run.run_id, run.run_id)
        else:
            _forget_rows(store, record.data)
            store.delete(f"runs/{run.run_id}/run.json")
            attempts.forget(store, run.run_id, run.attempt)
        raise
    _forget_rows(store, record.data)


def _inside(store: Store, folder: str) -> Store:
    return dataclasses.replace(store, url=store.join(folder), root=store.path(folder)) if folder else store


def _forget_rows(store: Store, folder: str) -> None:
    if folder:
        store.remove_tree(folder)


def _goes_on(request: Request, store: Store, run_id: str) -> bool:
    """Whether something of the failed run is worth its rows' room."""
    return request.store is not None and bool(Checkpoints(store, run_id).published())


def _written(df: DataFrame, request: Request, store: Store) -> tuple[Manifest, Planned | None]:
    """Rows to train on, and rows to validate with."""
    writing = Writing(transformed=request.brought.transformation is not None)
    if request.validation is None:
        return materialize(df, request.used_cols, store, writing), None
    column = request.validation if isinstance(request.validation, str) else None
    fraction = 0.0 if isinstance(request.validation, str) else request.validation
    split = Split(fraction, column, request.seed)
    manifest, seen = materialize_split(df, request.used_cols, store, split, writing)
    batch = (request.val_batch_size or request.batch_size) * request.num_workers
    plan = DataPlan.for_run(
        seen.group_rows,
        batch,
        request.seed,
        request.max_workers,
        seen.decoded_bytes_per_group(),
        DEFAULT_CACHE_BYTES,
        shuffle=False,
    )
    return manifest, (seen, plan)


def _plan(request: Request, manifest: Manifest) -> DataPlan:
    return DataPlan.for_run(
        manifest.group_rows,
        request.global_batch,
        request.seed,
        request.max_workers,
        manifest.decoded_bytes_per_group(),
        DEFAULT_CACHE_BYTES,
        request.shuffle,
    )
