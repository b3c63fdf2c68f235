"""The description of a training that the driver ships to the workers: plain values, of no framework."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.group_reader import Reader
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointPolicy
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.transformation import Transformation


@dataclass(frozen=True)
class Rows:
    """A data set and the order of its steps."""

    data: Store  # where the files of the manifest are
    manifest: Manifest  # the files, and the rows in them
    plan: DataPlan  # the order of these rows


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything that a worker knows about a training, except the user's objects."""

    config: FitConfig  # the parameters of the fit
    rows: Rows  # rows to train on
    validation: Rows | None = None  # rows to validate with after each epoch, if any
    features: tuple[Column, ...]  # the feature columns in the shapes that the model takes
    store: Store  # where results and checkpoints are written
    result: str  # name of the final model in `store`
    lr_scale: int = 1  # factor for all learning rates when the training begins (`scale_lr`)
    ledger: str | None = None  # folder for the rows of each step, absolute or in `store`; None: no ledger
    checkpoints: CheckpointPolicy | None = None  # when they are written; None: never

    @property
    def plan(self) -> DataPlan:
        return self.rows.plan

    def open_reader(self, rows: Rows) -> tuple[Reader, StepLoader]:
        columns = [rows.manifest.column(name) for name in dict.fromkeys(self.config.data.used_cols)]
        cache_bytes = sys.maxsize if self.config.data.inmemory_cache_all else DEFAULT_CACHE_BYTES
        names = [column.name for column in columns]
        reader = open_reader(self.config.data.reader, rows.data, rows.manifest, names, cache_bytes)
        return reader, StepLoader(rows.plan, reader, columns)


class UserObjects(Protocol):
    """What the user brings to a training: the framework's model, optimizer, losses and so on. Workers get a copy."""

    @property
    def transformation(self) -> Transformation | None:
        """The user's function of the columns of a batch."""
        ...

    @property
    def activation(self) -> str | None:
        """What makes probabilities of the model's outputs, by the loss."""
        ...

    def identity(self) -> dict[str, str]:
        """Digests of the objects that may not change later (R19, resuming a run), by the names that errors use."""
        ...
