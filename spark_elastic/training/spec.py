"""What the driver ships to the workers of a fit: its checked parameters, its rows and where its results go.

Each component has a config of its own, which checks its values and says the first mistake in one sentence. A new
parameter of training is a field of its component and a declaration in `estimators/params.py`, which says what it means;
a run is bound to it unless it `may_change`. Values only, of no framework.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_type_hints

from spark_elastic.checks import (
    ABOVE_0,
    COLUMN,
    COUNT,
    FLAG,
    Check,
    check_workers,
    make_choice,
    make_number,
    make_whole,
    param,
)
from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.group_reader import Reader
from spark_elastic.data.reading.readers import check_reader, open_reader
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.data.transformation import Transformation, TransformationConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.runs.checkpoint import CheckpointPolicy

SEED = make_whole(0, 2**64 - 1, "a whole number from 0, below 2**64")


def _check_columns(name: str, value: Any) -> tuple[str, ...]:
    columns = tuple(value or ())
    if not columns:
        raise InvalidInput(f"{name} is empty: name at least one column.")
    for column in columns:
        if columns.count(column) > 1:  # the label of an autoencoder may be a feature, too
            raise InvalidInput(f"column {column!r} is named twice in {name}.")
    return columns


def _to_shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    shapes = [tuple(map(operator.index, shape)) for shape in value]
    shapes = [shape[1:] if shape[:1] == (-1,) else shape for shape in shapes]  # Horovod's include the rows
    return tuple(tuple(map(COUNT.convert, shape)) for shape in shapes)


def _to_validation(value: Any) -> float | str | None:
    if value is None or value == 0:
        return None
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, float) or not 0 < value < 1:
        raise ValueError
    return value


def _check_reader(name: str, value: Any) -> str:
    check_reader(value)
    return str(value)


_LEARNING_RATE = make_number("a number of 0 or more", lambda rate: 0 <= rate < math.inf)
_SHAPES = Check("one shape per column, of sizes of 1 or more, such as [(1, 28, 28)]", _to_shapes).or_none()
_SIXTEEN_BITS = make_choice("bf16", "fp16").or_none()
_VALIDATION = Check("a fraction of the rows below 1, or the name of a column", _to_validation)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows a fit takes, in which order, and how many at a time."""

    feature_cols: tuple[str, ...] = param(_check_columns)  # fed to the model, in the order of its inputs
    label_cols: tuple[str, ...] = param(_check_columns)  # columns fed to the loss
    sample_weight_col: str | None = param(COLUMN.or_none(), None)  # column with a weight for each row
    input_shapes: tuple[tuple[int, ...], ...] | None = param(_SHAPES, None)
    label_shapes: tuple[tuple[int, ...], ...] | None = param(_SHAPES, None)
    validation: float | str | None = param(_VALIDATION, None)
    batch_size: int = param(COUNT, 32)  # rows of one forward pass of a worker
    val_batch_size: int | None = param(COUNT.or_none(), None, may_change=True)  # None: batch_size
    backward_passes_per_step: int = param(COUNT, 1)  # forward passes of a worker whose gradients are one step
    epochs: int = param(COUNT, 1, may_change=True)  # passes over the data
    seed: int = param(SEED, 0)  # seed of the order of rows and of the workers' random numbers
    shuffle: bool = param(FLAG, True)  # whether each epoch has its own order of rows
    row_order: str | None = param(make_choice("hash", "table").or_none(), None)
    lanes: int | None = param(COUNT.or_none(), None)
    reader: str = param(_check_reader, "arrow", may_change=True)  # a name of `data.reading.readers`
    inmemory_cache_all: bool = param(FLAG, False, may_change=True)  # whether a worker keeps decoded rows

    def __post_init__(self) -> None:
        for name, role, columns in (
            ("input_shapes", "feature", self.feature_cols),
            ("label_shapes", "label", self.label_cols),
        ):
            shapes = getattr(self, name)
            if shapes is not None and len(shapes) != len(columns):
                raise InvalidInput(f"{name} has {len(shapes)} shapes for {len(columns)} {role} columns.")

    @property
    def validation_batch(self) -> int:
        return self.val_batch_size or self.batch_size

    @property
    def used_cols(self) -> list[str]:
        """The columns that workers read; a column that is both feature and label is named twice."""
        return [*self.feature_cols, *self.label_cols, *filter(None, [self.sample_weight_col])]


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """How many workers train, and what each gets."""

    num_workers: int = param(COUNT, 1, may_change=True)  # at the start; the global batch is made for them
    min_workers: int = param(COUNT, 1, may_change=True)  # fewest to continue with
    max_workers: int = param(COUNT.or_none(), None, may_change=True)  # None: becomes num_workers
    balance_rows: bool = param(FLAG, False, may_change=True)  # whether slow workers get fewer rows of a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_workers", self.max_workers or self.num_workers)
        check_workers(self.min_workers, self.num_workers, self.max_workers)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How the optimizer steps, and in which precision the model computes."""

    learning_rate: float | None = param(_LEARNING_RATE.or_none(), None)
    scale_lr: bool = param(FLAG, False)  # whether all learning rates are multiplied by num_workers, once
    gradient_clip_norm: float | None = param(ABOVE_0.or_none(), None)  # 2-norm of all gradients together
    gradient_clip_value: float | None = param(ABOVE_0.or_none(), None)  # of an element of a gradient
    precision: str | None = param(_SIXTEEN_BITS, None)  # of autocast in forward passes; None: there is none
    compile_model: bool = param(FLAG, False, may_change=True)  # whether workers compile the forward pass


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the loss sees, and what happens when it is not finite."""

    loss_scope: str | None = param(make_choice("step", "worker").or_none(), None, may_change=True)
    terminate_on_nan: bool = param(FLAG, True, may_change=True)  # whether NaN or infinity ends the training


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How a fit's gradients are divided and sent."""

    determinism: str | None = param(make_choice("bitwise").or_none(), None)
    virtual_shares: int = param(COUNT, 8)  # parts of a step in bitwise mode, each computed by one worker
    verify_steps: int | None = param(COUNT.or_none(), None, may_change=True)
    gradient_compression: str | None = param(_SIXTEEN_BITS, None)  # of float32 gradients as they are sent

    def __post_init__(self) -> None:
        if self.determinism is None and self.verify_steps is not None:
            raise InvalidInput(
                "verify_steps compares the bits of virtual shares: set determinism='bitwise', or leave it out."
            )
        if self.determinism is not None and self.gradient_compression is not None:
            raise InvalidInput(
                "determinism='bitwise' sends gradients as they are: leave gradient_compression out."
            )

    @property
    def shares(self) -> int:
        """Virtual shares of a step in bitwise mode; 0: the workers divide its rows."""
        return 0 if self.determinism is None else self.virtual_shares


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What a fit was asked for, as plain values."""

    data: DataConfig
    world: WorldConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    exchange: ExchangeConfig
    transformation: TransformationConfig

    @classmethod
    def from_params(cls, values: Mapping[str, Any]) -> FitConfig:
        """Check the parameters of an estimator, by name. Raises InvalidInput: the first mistake, in one sentence."""
        return cls(**{name: _check_part(kind, values) for name, kind in get_type_hints(cls).items()})

    def __post_init__(self) -> None:
        shares = self.exchange.shares
        if not shares:
            return
        if self.world.max_workers > shares:
            raise InvalidInput(
                f"determinism='bitwise' divides a step over {shares} workers at most, and max_workers is "
                f"{self.world.max_workers}: raise virtual_shares to it."
            )
        if shares > self.global_batch:
            raise InvalidInput(
                f"a step of {self.global_batch} rows cannot be cut into virtual_shares={shares}: raise "
                "batch_size, or lower virtual_shares."
            )
        if self.optimizer.compile_model:
            raise InvalidInput(
                "determinism='bitwise' cannot compile the model, since compiled code depends on the shapes that a "
                "worker has seen: leave compile_model out."
            )

    @property
    def global_batch(self) -> int:
        """Rows of one step, whatever the size of the world."""
        return self.data.batch_size * self.data.backward_passes_per_step * self.world.num_workers

    def list_run_settings(self) -> dict[str, Any]:
        """The parameters that must stay the same for a whole run, as JSON gives them back (R19, resuming a run)."""
        settings = {
            field.name: _to_json_value(getattr(part, field.name))
            for part in vars(self).values()
            for field in dataclasses.fields(part)
            if not field.metadata["may_change"]
        }
        # The other values leave the steps as they are.
        return {**settings, "loss_scope": "step" if self.loss.loss_scope == "step" else None}


def _check_part(kind: type[Any], values: Mapping[str, Any]) -> Any:
    fields = [field for field in dataclasses.fields(kind) if field.name in values]
    return kind(**{field.name: field.metadata["check"](field.name, values[field.name]) for field in fields})


def _to_json_value(value: Any) -> Any:
    return [_to_json_value(each) for each in value] if isinstance(value, tuple) else value


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
