"""One fit: from a DataFrame and a checked request to a fitted model.

Owns the order: columns, store, hosts, data, training, model; each part lives elsewhere. The module and optimizer of
the request are only read: what is trained are copies. Runs in the caller's thread.
"""

from __future__ import annotations

import copy
import io
import json
import math
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import cloudpickle
import torch

from spark_elastic.clock import SystemClock
from spark_elastic.data.arrow_reader import DEFAULT_CACHE_BYTES
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.fitted_model import ElasticTorchModel
from spark_elastic.estimators.history import FitSummary, WorldRecord
from spark_elastic.estimators.persistence import pack
from spark_elastic.estimators.predictor import Predictor
from spark_elastic.estimators.validation import Request
from spark_elastic.launch import LaunchResult, launch
from spark_elastic.observe.progress import Progress
from spark_elastic.protocol.types import Limits
from spark_elastic.spark.materialize import materialize
from spark_elastic.spark.preflight import preflight
from spark_elastic.spark.schema import check_columns
from spark_elastic.torch.train_task import TorchTrainTask, TrainSpec
from spark_elastic.torch.training import Clipping

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

FRAMEWORKS = ("torch",)
# The first step of an unpickled optimizer imports torch._dynamo: 1.5 s for which a whole world would await a joiner.
PRELOAD = ("torch", "torch._dynamo")


def fit(df: DataFrame, request: Request) -> ElasticTorchModel:
    """Train on `df`; everything that can be seen to be wrong without a Spark job is said before the first one."""
    check_columns(df.schema, request.feature_cols, request.label_cols, request.sample_weight_col)
    clock = SystemClock()
    started = clock.now()
    run_id = request.run_id or uuid.uuid4().hex[:12]
    sc = df.sparkSession.sparkContext
    with _opened(request, sc) as store:
        ledger = _ledger(request, store, run_id)
        payload = cloudpickle.dumps((request.model, request.optimizer, request.loss))
        preflight(sc, payload, store, FRAMEWORKS, request.config.start_timeout)
        with _data(df, request, store, run_id) as (data, manifest):
            spec = _spec(request, store, data, manifest, f"runs/{run_id}/model.pt", ledger)
            result = _train(df.sparkSession, request, spec, run_id)
        trained = json.loads(result.results[0])
        model = _trained_model(request, store, trained["model"])
    summary = FitSummary(
        run_id=run_id,
        epochs=tuple(trained["history"]),
        worlds=tuple(WorldRecord(world.seconds, world.size, world.reason) for world in result.worlds),
        seconds=clock.now() - started,
        data_rows=manifest.rows,
        digest=trained["digest"],
    )
    return ElasticTorchModel(Predictor(pack(model), spec.features), summary)


@contextmanager
def _opened(request: Request, sc: SparkContext) -> Iterator[Store]:
    """The request's store; without one, a folder of this machine for as long as the fit takes."""
    if request.store is not None:
        yield Store.open(request.store)
    elif str(sc.master).startswith("local"):
        with tempfile.TemporaryDirectory(prefix="spark_elastic-") as folder:
            yield Store.open(folder)
    else:
        raise InvalidInput(
            f"store is missing: the executors of {sc.master} may be on other machines, so give a path or url that "
            "all of them share."
        )


@contextmanager
def _data(df: DataFrame, request: Request, store: Store, run_id: str) -> Iterator[tuple[Store, Manifest]]:
    """The columns in the store: for all fits to come (`keep_data`), or in a folder of this run until it is over."""
    names = [*request.feature_cols, *request.label_cols, *filter(None, [request.sample_weight_col])]
    if request.keep_data:
        yield store, materialize(df, names, store)
        return
    own = f"runs/{run_id}/rows"
    data = replace(store, url=store.join(own), root=store.path(own))
    try:
        yield data, materialize(df, names, data)
    finally:
        store.remove_tree(own)


def _limits(request: Request) -> Limits:
    config = request.config
    return Limits(
        num_workers=request.num_workers,
        min_workers=request.min_workers,
        max_workers=request.max_workers,
        gather_timeout=config.gather_timeout,
        start_timeout=config.start_timeout,
        lease=config.lease,
        driver_timeout=config.driver_timeout,
        failure_budget=config.failure_budget,
        failure_window=config.failure_window,
        reset_limit=config.reset_limit,
        max_global_batch=request.global_batch,
    )


def _inputs(request: Request, manifest: Manifest) -> tuple[Column, ...]:
    """The feature columns as the model sees them."""
    columns = [manifest.column(name) for name in request.feature_cols]
    shapes = request.input_shapes or [column.shape for column in columns]
    for column, shape in zip(columns, shapes, strict=True):
        if math.prod(shape) != math.prod(column.shape):
            raise InvalidInput(
                f"input_shapes says {shape} for column {column.name!r}, whose rows have {math.prod(column.shape)} "
                "numbers."
            )
    return tuple(replace(column, shape=shape) for column, shape in zip(columns, shapes, strict=True))


def _spec(
    request: Request, store: Store, data: Store, manifest: Manifest, result: str, ledger: str | None
) -> TrainSpec:
    plan = DataPlan.for_run(
        manifest.group_rows,
        request.global_batch,
        request.seed,
        request.max_workers,
        manifest.decoded_bytes_per_group(),
        DEFAULT_CACHE_BYTES,
        request.shuffle,
    )
    return TrainSpec(
        data=data,
        manifest=manifest,
        plan=plan,
        store=store,
        result=result,
        features=_inputs(request, manifest),
        labels=request.label_cols,
        weight=request.sample_weight_col,
        batch_size=request.batch_size,
        epochs=request.epochs,
        seed=request.seed,
        clipping=Clipping(request.gradient_clip_norm, request.gradient_clip_value),
        ledger=ledger,
    )


def _train(spark: SparkSession, request: Request, spec: TrainSpec, run_id: str) -> LaunchResult:
    # Pickled by `launch`: what workers train are copies of the model and the optimizer.
    task = TorchTrainTask(spec, request.model, request.optimizer, request.loss)
    shown = Progress(request.epochs, listener=request.on_progress, quiet=request.verbose == 0)
    with closing(shown) as progress:
        return launch(spark, task, _limits(request), request.config, run_id, PRELOAD, progress)


def _ledger(request: Request, store: Store, run_id: str) -> str | None:
    if not request.config.ledger:
        return None
    if not store.is_local:
        raise InvalidInput(f"ledger=True needs a store that is a folder; {store.url} is none.")
    return store.path(f"runs/{run_id}/ledger")


def _trained_model(request: Request, store: Store, name: str) -> torch.nn.Module:
    """A copy of the request's module with the weights that training left in the store."""
    model = copy.deepcopy(request.model)
    model.load_state_dict(
        torch.load(io.BytesIO(store.read_bytes(name)), map_location="cpu", weights_only=True)
    )
    return model.eval()
