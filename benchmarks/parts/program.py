"""The estimator's training as a program of its own, without an estimator and without Spark."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_collectives import Group
from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.protocol.types import START, MembershipVersion
from spark_elastic.runs.ledger import Ledger
from spark_elastic.tables.existing_parquet import describe_parquet
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import FitConfig, Rows, TrainSpec
from spark_elastic.training.torch.loss import ModelLoss
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.step import GradientScaling, TrainStep
from spark_elastic.training.torch.trainer import TorchTrainProgram
from spark_elastic.training.trainer import StepCall


def write_rows(path: Path, x: npt.NDArray[Any], y: npt.NDArray[Any], group: int) -> None:
    """A Parquet file of row groups of `group` rows. x: (rows, ...)."""
    flat = x.reshape(len(x), -1)
    column = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
    table = pa.table({"x": column, "y": y})
    pq.write_table(table, path, row_group_size=group, compression="none", use_dictionary=False)


def build_program(
    folder: Path,
    objects: TorchUserObjects,
    step_rows: int,
    workers: int,
    ledger: str | None = None,
    **config: Any,
) -> TorchTrainProgram:
    """Of the files in `folder`, as `write_rows` writes them. step_rows: of all workers together."""
    store = Store.open(str(folder))
    manifest = describe_parquet(store, ["x", "y"])
    most = manifest.max_decoded_group_bytes()
    plan = DataPlan.for_run(manifest.group_rows, step_rows, 3, workers, most, 1 << 30)
    shape = config.pop("shape", None)
    x = manifest.column("x")
    spec = TrainSpec(
        config=FitConfig.from_params({"feature_cols": ["x"], "label_cols": ["y"], **config}),
        rows=Rows(store, manifest, plan),
        features=(x if shape is None else Column("x", x.dtype, shape),),
        store=store,
        result=f"final-{os.getpid()}",
        ledger=ledger,
    )
    return TorchTrainProgram(spec, objects)


def make_step(
    state: TorchTrainingState,
    rows: tuple[Any, Any],
    loss: Any,
    group: Group,
    ending: ExitStack,
    **config: Any,
) -> Callable[[], object]:
    """A step of the estimator's worker. rows: this rank's features and labels."""
    x, y = rows
    numbers = np.arange(group.rank * len(x), (group.rank + 1) * len(x))
    batch = LocalBatch(len(x) * group.size, numbers, (x,), (y,), None)
    exchange = ending.enter_context(closing(GradientExchange(state.model.named_parameters())))
    settings = FitConfig.from_params({"feature_cols": ["x"], "label_cols": ["y"], **config})
    model_loss, metrics = ModelLoss(loss, weighted=False), Metrics({}, ["y"], logs=False)
    taker = TrainStep(state, model_loss, exchange, settings, Ledger(), metrics, GradientScaling())
    call = StepCall(group, MembershipVersion(), lambda decision: START)
    return lambda: taker.run(copy.copy(batch), call)
