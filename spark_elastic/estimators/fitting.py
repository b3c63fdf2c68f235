"""One fit: from rows and a checked request to the weights of a trained model, for any framework.

The model and optimizer of the request are only read; workers train copies. Runs in the caller's thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.coordinator import resume_after_coordinator_loss
from spark_elastic.clusters.run import user_code
from spark_elastic.clusters.spark import make_platform
from spark_elastic.clusters.spark.platform import JobSpec, SparkPlatform
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reading.readers import read_sample_row
from spark_elastic.data.scratch import make_scratch_folder
from spark_elastic.data.store import Store
from spark_elastic.driver.job import LaunchResult, make_limits
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.fit_rows import RowSource, RunRecord, RunResult, materialize_rows
from spark_elastic.estimators.transformer import FitSummary, WorldRecord
from spark_elastic.estimators.validation import FitRequest, O
from spark_elastic.monitoring.console import ProgressListener
from spark_elastic.monitoring.listener import close_within_deadline
from spark_elastic.monitoring.logs import announce_phase, log_to_listener
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.types import Limits, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointPolicy, CheckpointStore, OwnedRun
from spark_elastic.training.spec import Rows, TrainSpec, UserObjects
from spark_elastic.worker.imports import is_installed, list_early_imports
from spark_elastic.worker.program import Program

log = logging.getLogger("spark_elastic")

PAYLOAD = "the model, optimizer or loss"  # what messages call the user's objects
# What an estimator calls those that are not called as they are in `UserObjects`.
PARAMETERS = {"losses": "loss", "transformation": "transformation_fn"}
UNSCALED = (
    "the learning rate is not multiplied by the world's size: a step takes the same rows whatever that is; "
    "scale_lr=True multiplies it by num_workers"
)


@dataclass(frozen=True)
class Framework(Generic[O]):
    """What `train_model` needs to know about torch or Keras."""

    packages: tuple[str, ...]  # packages that executors must have
    preload: tuple[str, ...]  # modules that a spare imports in advance
    suffix: str  # suffix of a file of weights
    build_program: Callable[[TrainSpec, O], Program]  # builds the program that each worker runs


@dataclass(frozen=True)
class FitResult:
    """The trained weights and their description, from which a framework makes its fitted model."""

    weights: bytes  # as the workers wrote them
    features: tuple[Column, ...]  # the feature columns as the model takes them, or as the transformation does
    summary: FitSummary  # what the fitted model tells of its training
    # A row of the features for a model with a transformation, if rows were read.
    sample: list[Any] | None = None


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, in this fit or in another one."""

    record: RunRecord  # what it is bound to
    result: RunResult  # what it trained
    report: JobReport = field(default_factory=JobReport)  # empty if another fit trained it
    sample: list[Any] | None = None  # as in `FitResult`; None if another fit trained it


def train_model(rows: RowSource, request: FitRequest[O], framework: Framework[O]) -> FitResult:
    """Train on `rows`. Every mistake that can be found without a Spark job is reported before the first one."""
    rows.check(request)
    clock = SystemClock()
    started = clock.now()
    run_id = request.run_id or uuid.uuid4().hex[:12]
    # Nobody can resume a run whose name nobody has chosen.
    elastic = request.elastic if request.run_id else dataclasses.replace(request.elastic, keep_commits=False)
    platform = make_platform(rows.session, elastic)
    with _open_store(request, platform.master) as store:
        run = _load_finished_run(rows, request, store, run_id)
        if run is None:
            ledger = _ledger_folder(request, store, run_id)
            payload, modules = _pickle_objects(request.objects)
            imports = list_early_imports(request.objects, (*framework.preload, *modules))
            with _show_progress(request) as listener:
                workers = request.config.world.num_workers
                platform.preflight(payload, store, framework.packages, workers, PAYLOAD, imports)
                fit = FitRun(platform, rows, request, framework, store, run_id, ledger, listener, modules)
                run = resume_after_coordinator_loss(fit.run, CheckpointStore(store, run_id).read_published)
        weights = _read_weights(store, run.result)
        features = shape_features(request, run.record.load_manifest())
    summary = _summarize(run, run_id, clock.now() - started, rows.describe(run.record))
    return FitResult(weights, features, summary, run.sample)


def _pickle_objects(objects: UserObjects) -> tuple[bytes, tuple[str, ...]]:
    """The pickled objects, and the modules that loading them imports. InvalidInput names what cannot be pickled."""
    modules: dict[str, None] = {}
    try:
        payload = user_code.dumps(objects, modules=modules)
        return payload, tuple(f"{name}?" for name in modules if is_installed(name))
    except InvalidInput:
        for name, value in vars(objects).items():
            user_code.dumps(value, f"the parameter {PARAMETERS.get(name, name)}")
        raise


def _load_finished_run(
    rows: RowSource, request: FitRequest[Any], store: Store, run_id: str
) -> FinishedRun | None:
    """The run if it has ended. Raises InvalidInput if this request may not resume it (R19, resuming a run)."""
    record, result = RunRecord.load(store, run_id), RunResult.load(store, run_id)
    if record is not None:
        record.check(request, run_id)
    wanted, had = request.config.data.epochs, None if result is None else result.epochs
    if had not in (None, wanted):
        raise InvalidInput(
            f"run_id {run_id!r} has ended, with epochs={had}, not {wanted}: use another run_id."
        )
    if record is not None and result is None:
        _check_epochs_left(request, CheckpointStore(store, run_id), run_id)
    if record is not None:
        rows.check_same_rows(request, record, run_id)
    return FinishedRun(record, result) if record is not None and result is not None else None


def _check_epochs_left(request: FitRequest[Any], checkpoints: CheckpointStore, run_id: str) -> None:
    """Raises InvalidInput if the run's newest checkpoint has steps of an epoch that this fit does not want."""
    wanted, published = request.config.data.epochs, checkpoints.read_published()
    if published and published[0].position > Position(wanted, Phase.TRAIN, 0):
        raise InvalidInput(
            f"run_id {run_id!r} is in epoch {published[0].position.epoch + 1} already and this fit wants {wanted} "
            "epochs: ask for more, or use another run_id."
        )


def _summarize(run: FinishedRun, run_id: str, seconds: float, data: str) -> FitSummary:
    result, content = run.result, run.record.load_manifest().content
    worlds = tuple(WorldRecord(world.at, world.size, world.reason) for world in run.report.world_changes)
    report, epochs = run.report.with_rows(result.history, result.data_rows), tuple(result.history)
    rows, digest = result.data_rows, result.digest
    return FitSummary(run_id, epochs, worlds, seconds, rows, digest, data, content[:32], report)


@contextmanager
def _open_store(request: FitRequest[Any], master: str) -> Iterator[Store]:
    """The request's store; without one, a folder of this machine for as long as the fit takes."""
    if request.store is not None:
        yield Store.open(request.store, **request.storage_options)
    elif master.startswith("local"):
        with make_scratch_folder() as folder:
            yield Store.open(str(folder))
    else:
        raise InvalidInput(
            f"store is missing: executors of {master} may be on other machines, so give a path or url that all share."
        )


def _ledger_folder(request: FitRequest[Any], store: Store, run_id: str) -> str | None:
    if not request.elastic.ledger:
        return None
    folder = f"runs/{run_id}/ledger"
    return store.path(folder) if store.is_local else folder


@contextmanager
def _show_progress(request: FitRequest[Any]) -> Iterator[ProgressListener]:
    epochs, quiet, show_logs = request.config.data.epochs, request.verbose == 0, request.elastic.show_logs
    listener = ProgressListener(epochs, callback=request.on_progress, quiet=quiet, show_output=show_logs)
    with close_within_deadline(listener), log_to_listener(listener.on_message, request.verbose > 1):
        yield listener


@dataclass(frozen=True)
class FitRun(Generic[O]):
    """The inputs of one training."""

    platform: SparkPlatform  # launches its job
    rows: RowSource  # which rows, and how they come into files
    request: FitRequest[O]  # what the user asked for
    framework: Framework[O]  # what differs between torch and Keras
    store: Store  # of run, checkpoints, model and ledger
    run_id: str  # the user's, or a random one
    ledger: str | None  # folder of the ledger, if there is one
    listener: ProgressListener  # shows the progress
    modules: tuple[str, ...] = ()  # modules that loading the user's objects imports

    def run(self) -> FinishedRun:
        """Train from the beginning, or from the newest checkpoint of an unfinished run."""
        run = OwnedRun.acquire(self.store, self.run_id)
        # Another driver ended it while this one waited
        if RunResult.load(self.store, self.run_id) is not None:
            finished = _load_finished_run(self.rows, self.request, self.store, self.run_id)
            if finished is not None:
                return finished
        with materialize_rows(self.rows, self.request, self.store, run) as (record, data):
            manifest = record.load_manifest()
            launched = self.launch(self.build_spec(record, data, run), run)
            trained = check_replicas([json.loads(result) for result in launched.results])
            told = {name: trained[name] for name in ("model", "sha256", "digest", "history")}
            epochs = self.request.config.data.epochs
            result = RunResult(**told, epochs=epochs, data_rows=manifest.rows)
            run.check()
            # Before rows and checkpoints, which could resume the run, are deleted
            result.save(self.store, self.run_id)
            sample = _read_sample(self.request, data, manifest)
        run.remove_partial()  # of a worker that was lost while it wrote the model
        run.delete_objects(f"runs/{self.run_id}/checkpoints", run.commit_key_name)
        return FinishedRun(record, result, launched.report, sample)

    def build_spec(self, record: RunRecord, data: Store, run: OwnedRun) -> TrainSpec:
        """Everything that the workers need to know, except the user's objects."""
        request, elastic = self.request, self.request.elastic
        manifest, validation = record.load_manifest(), record.load_validation()
        return TrainSpec(
            config=request.config,
            rows=Rows(data, manifest, record.build_plan(manifest)),
            validation=None if validation is None else Rows(data, *validation),
            features=shape_features(request, manifest),
            store=self.store,
            # A former driver that lost the run may still write a model of its own.
            result=f"runs/{self.run_id}/model-{run.attempt:06d}{self.framework.suffix}",
            lr_scale=record.count_initial_workers() if request.config.optimizer.scale_lr else 1,
            ledger=self.ledger,
            checkpoints=CheckpointPolicy(self.run_id, elastic.checkpoint_steps, elastic.checkpoint_seconds),
        )

    def launch(self, spec: TrainSpec, run: OwnedRun) -> LaunchResult:
        config = self.request.config
        # `launch` pickles the program: workers train copies of the model and the optimizer.
        program = self.framework.build_program(spec, self.request.objects)
        if config.world.num_workers > 1 and not config.optimizer.scale_lr:
            announce_phase(UNSCALED)
        limits = make_fit_limits(self.request, spec.plan.global_batch)
        job = JobSpec(program, limits, self.request.run_id or "", self.framework.preload, run, self.modules)
        return self.platform.launch(job, self.listener)


def make_fit_limits(request: FitRequest[Any], global_batch: int) -> Limits:
    """The limits of the job: none of its worlds has more workers than a step has rows."""
    world = request.config.world
    limits = make_limits(request.elastic, world.num_workers, world.min_workers, world.max_workers)
    return dataclasses.replace(limits, max_global_batch=global_batch)


def check_replicas(results: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Rank 0's result, compared with those of the others (P4, identical replicas); None: lost after its last step."""
    trained = results[0]
    assert trained is not None  # or training would not have ended
    differ = [rank for rank, own in enumerate(results) if own and own["digest"] != trained["digest"]]
    if differ:  # only a warning: after days of training the user wants to see the model
        log.warning(
            "the weights or the optimizer of ranks %s came to differ from rank 0's, whose model this is: look for "
            "callbacks, hooks or layers that act otherwise on one worker than on another.",
            differ,
        )
    return trained


def shape_features(request: FitRequest[Any], manifest: Manifest) -> tuple[Column, ...]:
    """The feature columns in the shapes that the model takes, or as stored for a transformation."""
    columns = [manifest.column(name) for name in request.config.data.feature_cols]
    if request.objects.transformation is not None:
        return tuple(columns)
    shapes = request.config.data.input_shapes or [column.shape for column in columns]
    for column, shape in zip(columns, shapes, strict=True):
        if math.prod(shape) != math.prod(column.shape):
            raise InvalidInput(
                f"input_shapes says {shape} for column {column.name!r}, whose rows have {math.prod(column.shape)} "
                "numbers."
            )
    return tuple(dataclasses.replace(c, shape=shape) for c, shape in zip(columns, shapes, strict=True))


def _read_sample(request: FitRequest[Any], data: Store, manifest: Manifest) -> list[Any] | None:
    """A row for `transform` to try a transformation on; an error here must not cost the trained model."""
    if request.objects.transformation is None:
        return None
    try:
        return read_sample_row(data, manifest, request.config.data.feature_cols)
    except Exception as error:
        log.debug("no row to try the transformation on: %s", error)
        return None


def _read_weights(store: Store, result: RunResult) -> bytes:
    weights = store.read_bytes(result.model)
    if hashlib.sha256(weights).hexdigest() != result.sha256:
        raise StoreError(f"{result.model} in the store {store.url} is not what was trained, by its SHA-256.")
    return weights
