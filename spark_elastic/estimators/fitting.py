"""One fit: from rows and a checked request to the weights of a trained model, whatever the framework.

Owns the order: columns, store, hosts, data, training, model; each part lives elsewhere. The module and optimizer of
the request are only read: what is trained are copies. Runs in the caller's thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle

from spark_elastic.clock import SystemClock
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reading.readers import read_sample_row
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store, scratch_folder
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.fit_rows import RowSource
from spark_elastic.estimators.run_record import RunRecord, RunResult
from spark_elastic.estimators.transformer import FitSummary, WorldRecord
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.launch.job import LaunchResult, make_limits
from spark_elastic.launch.job_monitor import WorldSpan
from spark_elastic.monitoring.log_forwarding import AsyncNotifier, close_within_deadline, log_to_listener
from spark_elastic.monitoring.progress import ProgressListener
from spark_elastic.monitoring.report import JobReport
from spark_elastic.platforms import JobSpec, Platform, make_platform, resume_after_coordinator_loss
from spark_elastic.protocol.types import Limits
from spark_elastic.state.checkpoint import CheckpointPolicy, CheckpointStore
from spark_elastic.state.run_lease import RunLease
from spark_elastic.training.spec import Clipping, Rows, TrainSpec
from spark_elastic.worker.program import Program

log = logging.getLogger("spark_elastic")

BROUGHT = "the model, optimizer or loss"
UNSCALED = (
    "the learning rate is not multiplied by the world's size: a step takes the same rows whatever that is; "
    "scale_lr=True multiplies it by num_workers"
)


@dataclass(frozen=True)
class Framework:
    """What a fit must know of a framework.

    packages: that executors must have. preload: modules that a warm spare has imported. suffix: of a file of weights.
    task: from spec and what the user brought to the program of a worker.
    """

    packages: tuple[str, ...]
    preload: tuple[str, ...]
    suffix: str
    task: Callable[[TrainSpec, Any], Program]


@dataclass(frozen=True)
class Fitted:
    """weights: as the workers wrote them. features: see `_inputs`. sample: their values in a row, for a model whose
    inputs a function makes of them; None where rows were not read again."""

    weights: bytes
    features: tuple[Column, ...]
    summary: FitSummary
    sample: list[Any] | None = None


def fit(rows: RowSource, request: FitRequest, framework: Framework) -> Fitted:
    """Train on `rows`. Every mistake that can be found without a Spark job is reported before the first one."""
    rows.check(request)
    clock = SystemClock()
    started = clock.now()
    run_id = request.run_id or uuid.uuid4().hex[:12]
    platform = make_platform(rows.session, request.config)
    with _opened(request, platform.master) as store:
        record, result = _so_far(rows, request, store, run_id)
        if result is not None and record is not None:
            trained = _Trained(record, result)
        else:
            ledger = _ledger(request, store, run_id)
            payload = cloudpickle.dumps(request.brought)
            with _watched(request) as shown:
                platform.preflight(payload, store, framework.packages, request.num_workers, BROUGHT)
                training = _Training(platform, rows, request, framework, store, ledger, shown)
                trained = resume_after_coordinator_loss(
                    lambda: _trained(training, run_id), CheckpointStore(store, run_id).published
                )
            result = trained.result
        weights = _weights(store, result)
        features = _inputs(request, trained.record.load_manifest())
    summary = FitSummary(
        run_id=run_id,
        epochs=tuple(result.history),
        worlds=tuple(WorldRecord(world.seconds, world.size, world.reason) for world in trained.worlds),
        seconds=clock.now() - started,
        data_rows=result.data_rows,
        digest=result.digest,
        report=trained.report.with_rows(result.history, result.data_rows),
    )
    return Fitted(weights, features, summary, trained.sample)


def _so_far(
    rows: RowSource, request: FitRequest, store: Store, run_id: str
) -> tuple[RunRecord | None, RunResult | None]:
    """The run's documents, as far as they exist. It must be a run that this request may go on with (R19)."""
    record, result = RunRecord.load(store, run_id), RunResult.load(store, run_id)
    if record is not None:
        record.check(request, run_id)
    if result is not None and result.epochs != request.epochs:
        raise InvalidInput(
            f"run_id {run_id!r} ended after {result.epochs} epochs and this fit wants {request.epochs}: use another "
            "run_id."
        )
    if record is not None:
        rows.check_same_rows(request, record, run_id)
    return record, result


@dataclass(frozen=True)
class _Training:
    """What `_trained` needs: what is trained, on which rows, on which platform, and who is told."""

    platform: Platform
    rows: RowSource
    request: FitRequest
    framework: Framework
    store: Store
    ledger: str | None
    shown: ProgressListener


@contextmanager
def _watched(request: FitRequest) -> Iterator[ProgressListener]:
    shown = ProgressListener(
        request.epochs,
        listener=request.on_progress,
        quiet=request.verbose == 0,
        lines=request.config.show_logs,
    )
    with close_within_deadline(shown), log_to_listener(shown.tell, request.verbose > 1):
        yield shown


@dataclass(frozen=True)
class _Trained:
    """A run that has ended; the rest is known where this fit trained. sample: see `Fitted`."""

    record: RunRecord
    result: RunResult
    worlds: tuple[WorldSpan, ...] = ()
    report: JobReport = field(default_factory=JobReport)
    sample: list[Any] | None = None


def _trained(training: _Training, run_id: str) -> _Trained:
    """Train from the beginning, or from the newest checkpoint of an unfinished run."""
    request, framework, store = training.request, training.framework, training.store
    run = RunLease.acquire(store, run_id)
    if RunResult.load(store, run_id) is not None:  # another driver's, which ended it while this one waited
        record, ended = _so_far(training.rows, request, store, run_id)
        if record is not None and ended is not None:
            return _Trained(record, ended)
    with training.rows.materialize_rows(request, store, run) as (record, data):
        manifest = record.load_manifest()
        # An older driver that lost the run may still write its own.
        result = f"runs/{run_id}/model-{run.attempt:06d}{framework.suffix}"
        spec = _spec(request, store, data, record, run, result, training.ledger)
        launched = _train(training, spec, run)
        trained = _agreed([json.loads(result) for result in launched.results])
        ended = RunResult(
            trained["model"],
            trained["sha256"],
            trained["digest"],
            request.epochs,
            trained["history"],
            manifest.rows,
        )
        run.check()
        ended.save(store, run_id)  # before anything goes that the run could go on with
        sample = _sample(request, data, manifest)
    run.release(f"runs/{run_id}/checkpoints")
    return _Trained(record, ended, launched.worlds, launched.report, sample)


def _sample(request: FitRequest, data: Store, manifest: Manifest) -> list[Any] | None:
    """See `Fitted`. It only helps `transform`, so an error here must not cost the trained model."""
    if request.brought.transformation is None:
        return None
    try:
        return read_sample_row(data, manifest, request.feature_cols)
    except Exception as error:  # whatever it is, the model is trained
        log.debug("no row to try the transformation on: %s", error)
        return None


def _agreed(results: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Rank 0's result, compared with those of the replicas (P4). None: a worker was lost after its last step."""
    trained = results[0]
    assert trained is not None  # or training would not have ended
    differ = [
        rank for rank, each in enumerate(results) if each is not None and each["digest"] != trained["digest"]
    ]
    if differ:  # a warning, since whoever trained for days wants to look at the model for himself
        log.warning(
            "the weights or the optimizer of ranks %s came to differ from rank 0's, whose model this is: look for "
            "callbacks, hooks or layers that act otherwise on one worker than on another.",
            differ,
        )
    return trained


@contextmanager
def _opened(request: FitRequest, master: str) -> Iterator[Store]:
    """The request's store; without one, a folder of this machine for as long as the fit takes."""
    if request.store is not None:
        yield Store.open(request.store, **request.storage_options)
    elif master.startswith("local"):
        with scratch_folder() as folder:
            yield Store.open(str(folder))
    else:
        raise InvalidInput(
            f"store is missing: the executors of {master} may be on other machines, so give a path or url that "
            "all of them share."
        )


def _limits(request: FitRequest, global_batch: int) -> Limits:
    limits = make_limits(request.config, request.num_workers, request.min_workers, request.max_workers)
    return dataclasses.replace(limits, max_global_batch=global_batch)


def _inputs(request: FitRequest, manifest: Manifest) -> tuple[Column, ...]:
    """The feature columns as the model sees them, or as the user's function does: what it returns is reshaped."""
    columns = [manifest.column(name) for name in request.feature_cols]
    if request.brought.transformation is not None:
        return tuple(columns)
    shapes = request.input_shapes or [column.shape for column in columns]
    for column, shape in zip(columns, shapes, strict=True):
        if math.prod(shape) != math.prod(column.shape):
            raise InvalidInput(
                f"input_shapes says {shape} for column {column.name!r}, whose rows have {math.prod(column.shape)} "
                "numbers."
            )
    return tuple(
        dataclasses.replace(column, shape=shape) for column, shape in zip(columns, shapes, strict=True)
    )


def _spec(
    request: FitRequest,
    store: Store,
    data: Store,
    record: RunRecord,
    run: RunLease,
    result: str,
    ledger: str | None,
) -> TrainSpec:
    manifest, config, seen = record.load_manifest(), request.config, record.load_validation()
    return TrainSpec(
        data=data,
        manifest=manifest,
        plan=record.build_plan(manifest),
        store=store,
        result=result,
        features=_inputs(request, manifest),
        labels=request.label_cols,
        weight=request.sample_weight_col,
        batch_size=request.batch_size,
        epochs=request.epochs,
        seed=request.seed,
        clipping=Clipping(request.gradient_clip_norm, request.gradient_clip_value),
        label_shapes=request.label_shapes,
        validation=None if seen is None else Rows(data, *seen),
        val_batch_size=request.val_batch_size,
        learning_rate=request.learning_rate,
        lr_times=record.count_initial_workers(request) if request.scale_lr else 1,
        precision=request.precision,
        wire=request.gradient_compression,
        reader=request.reader,
        terminate_on_nan=request.terminate_on_nan,
        cache_bytes=sys.maxsize if request.inmemory_cache_all else DEFAULT_CACHE_BYTES,
        ledger=ledger,
        checkpoints=CheckpointPolicy(run.run_id, config.checkpoint_steps, config.checkpoint_seconds),
    )


def _train(training: _Training, spec: TrainSpec, run: RunLease) -> LaunchResult:
    request, framework = training.request, training.framework
    # Pickled by `launch`: what workers train are copies of the model and the optimizer.
    task = framework.task(spec, request.brought)
    if request.num_workers > 1 and not request.scale_lr:
        with AsyncNotifier() as teller:  # a terminal that blocks holds up no job
            teller.tell(partial(training.shown.tell, UNSCALED))
    limits = _limits(request, spec.plan.global_batch)
    order = JobSpec(task, limits, run.run_id, framework.preload, run)
    return training.platform.launch(order, training.shown)


def _ledger(request: FitRequest, store: Store, run_id: str) -> str | None:
    if not request.config.ledger:
        return None
    if not store.is_local:
        raise InvalidInput(f"ledger=True needs a store that is a folder; {store.url} is not one.")
    return store.path(f"runs/{run_id}/ledger")


def _weights(store: Store, result: RunResult) -> bytes:
    weights = store.read_bytes(result.model)
    if hashlib.sha256(weights).hexdigest() != result.sha256:
        raise StoreError(
            f"{result.model} in the store {store.url} is not what was trained: its SHA-256 differs."
        )
    return weights
