"""The estimator's training as a program of its own, without an estimator and without Spark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.tables.existing_parquet import describe_parquet
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.spec import Rows, TrainSpec
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram


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
