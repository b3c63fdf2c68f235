"""The parameters of one fit, checked: a frozen record that the driver and all workers use as it is.

`FitConfig.from_params` checks each value and says the first mistake in one sentence. A new parameter of training is
declared here and in `estimators/params.py`; a run is bound to it unless it is marked `may_change`. Values only.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spark_elastic.checks import (
    ABOVE_0,
    COLUMN,
    COUNT,
    FLAG,
    WHOLE,
    Check,
    check_workers,
    make_choice,
    make_number,
    make_whole,
)
from spark_elastic.data.reading.readers import check_reader
from spark_elastic.errors import InvalidInput

SIXTEEN_BITS = make_choice("bf16", "fp16").or_none()
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


_SHAPES = Check("one shape per column, of sizes of 1 or more, such as [(1, 28, 28)]", _to_shapes).or_none()
_VALIDATION = Check("a fraction of the rows below 1, or the name of a column", _to_validation)


def _param(
    check: Callable[[str, Any], Any], default: Any = dataclasses.MISSING, *, may_change: bool = False
) -> Any:
    """A field. may_change: a later fit of the same run may have another value."""
    metadata = {"check": check, "may_change": may_change}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What a fit was asked for, as plain values."""

    # Columns fed to the model, in the order of its inputs.
    feature_cols: tuple[str, ...] = _param(_check_columns)
    label_cols: tuple[str, ...] = _param(_check_columns)  # columns fed to the loss
    # Column with a weight for each row, or None.
    sample_weight_col: str | None = _param(COLUMN.or_none(), None)
    # Shape of one row of each feature column as the model takes it; None: as it is stored.
    input_shapes: tuple[tuple[int, ...], ...] | None = _param(_SHAPES, None)
    label_shapes: tuple[tuple[int, ...], ...] | None = _param(_SHAPES, None)  # the same for label columns
    # Rows to validate with: a fraction, or the name of the column that marks them; None: no validation.
    validation: float | str | None = _param(_VALIDATION, None)
    batch_size: int = _param(COUNT, 32)  # rows of one forward pass of a worker
    # The same in validation; None: batch_size.
    val_batch_size: int | None = _param(COUNT.or_none(), None, may_change=True)
    # Forward passes of a worker whose gradients are one step.
    backward_passes_per_step: int = _param(COUNT, 1)
    epochs: int = _param(COUNT, 1, may_change=True)  # passes over the data
    # Workers at the start; the global batch is made for them.
    num_workers: int = _param(COUNT, 1, may_change=True)
    min_workers: int = _param(COUNT, 1, may_change=True)  # fewest workers to continue with
    # Most workers ever; None stands for num_workers and is replaced by it.
    max_workers: int = _param(COUNT.or_none(), None, may_change=True)
    seed: int = _param(SEED, 0)  # seed of the order of rows and of the workers' random numbers
    shuffle: bool = _param(FLAG, True)  # whether each epoch has its own order of rows
    # Order in which a table's rows are written: "hash" or "table"; None: "hash" if they are shuffled.
    row_order: str | None = _param(make_choice("hash", "table").or_none(), None)
    # Streams that an epoch is cut into, as far as memory and rows of a step suffice; None: 16, or 2 for each worker.
    lanes: int | None = _param(COUNT.or_none(), None)
    # Learning rate of all parameter groups; None: the optimizer's own.
    learning_rate: float | None = _param(
        make_number("a number of 0 or more", lambda rate: 0 <= rate < math.inf).or_none(), None
    )
    # "bitwise": the weights have the same bits for any number of workers; None: the same up to rounding.
    determinism: str | None = _param(make_choice("bitwise").or_none(), None)
    # Parts that a step is cut into in bitwise mode, each computed by one worker.
    virtual_shares: int = _param(COUNT, 8)
    # So many steps after each other one virtual share is computed by other workers, too, and compared; None: none is.
    verify_steps: int | None = _param(COUNT.or_none(), None, may_change=True)
    # Whose rows a loss that compares rows sees: "step", all of the step; "worker", those of a backward pass of one
    # worker; None: such a loss is refused.
    loss_scope: str | None = _param(make_choice("step", "worker").or_none(), None, may_change=True)
    scale_lr: bool = _param(FLAG, False)  # whether all learning rates are multiplied by num_workers, once
    # Largest 2-norm of all gradients together; None: no limit.
    gradient_clip_norm: float | None = _param(ABOVE_0.or_none(), None)
    # Largest absolute value of an element of a gradient; None: no limit.
    gradient_clip_value: float | None = _param(ABOVE_0.or_none(), None)
    # Forward passes under autocast: "bf16", "fp16" or None.
    precision: str | None = _param(SIXTEEN_BITS, None)
    # Whether workers compile the model's forward pass.
    compile_model: bool = _param(FLAG, False, may_change=True)
    # Type in which float32 gradients are sent: "bf16", "fp16" or None.
    gradient_compression: str | None = _param(SIXTEEN_BITS, None)
    # What reads the rows, a name of `data.reading.readers`.
    reader: str = _param(_check_reader, "arrow", may_change=True)
    # Processes or threads of a worker that apply transformation_fn; 0: the training thread does.
    transformation_workers: int = _param(WHOLE, 0, may_change=True)
    # Which of them: "process" or "thread".
    transformation_pool: str = _param(make_choice("process", "thread"), "process", may_change=True)
    balance_rows: bool = _param(FLAG, False, may_change=True)  # whether slow workers get fewer rows of a step
    # Whether the first loss of NaN or infinity ends the training.
    terminate_on_nan: bool = _param(FLAG, True, may_change=True)
    # Whether a worker keeps all decoded rows, as far as memory allows.
    inmemory_cache_all: bool = _param(FLAG, False, may_change=True)

    def __post_init__(self) -> None:
        if not self.max_workers:
            object.__setattr__(self, "max_workers", self.num_workers)

    @classmethod
    def from_params(cls, values: Mapping[str, Any]) -> FitConfig:
        """Check the parameters of an estimator, by name.

        Raises:
            InvalidInput: the first mistake, in one sentence.
        """
        fields = dataclasses.fields(cls)
        checked = {f.name: f.metadata["check"](f.name, values[f.name]) for f in fields if f.name in values}
        config = cls(**checked)
        check_workers(config.min_workers, config.num_workers, config.max_workers or config.num_workers)
        config._check_shares()
        for name, role, columns in (
            ("input_shapes", "feature", config.feature_cols),
            ("label_shapes", "label", config.label_cols),
        ):
            shapes = getattr(config, name)
            if shapes is not None and len(shapes) != len(columns):
                raise InvalidInput(f"{name} has {len(shapes)} shapes for {len(columns)} {role} columns.")
        return config

    @property
    def global_batch(self) -> int:
        """Rows of one step, whatever the size of the world."""
        return self.batch_size * self.backward_passes_per_step * self.num_workers

    @property
    def shares(self) -> int:
        """Virtual shares of a step in bitwise mode; 0: the workers divide its rows."""
        return 0 if self.determinism is None else self.virtual_shares

    @property
    def validation_batch(self) -> int:
        """Rows of one forward pass of a worker in validation."""
        return self.val_batch_size or self.batch_size

    @property
    def used_cols(self) -> list[str]:
        """The columns that workers read; a column that is both feature and label is named twice."""
        return [*self.feature_cols, *self.label_cols, *filter(None, [self.sample_weight_col])]

    def list_run_settings(self) -> dict[str, Any]:
        """The parameters that must stay the same for a whole run, as JSON gives them back (R19, resuming a run)."""
        settings = {
            field.name: _to_json_value(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if not field.metadata["may_change"]
        }
        # The others leave the steps as they are.
        return {**settings, "loss_scope": self.loss_scope if self.loss_scope == "step" else None}

    def _check_shares(self) -> None:
        if not self.shares:
            if self.verify_steps is not None:
                raise InvalidInput(
                    "verify_steps compares the bits of virtual shares: set determinism='bitwise', or leave it out."
                )
            return
        if self.max_workers > self.shares:
            raise InvalidInput(
                f"determinism='bitwise' divides a step over {self.shares} workers at most, and max_workers is "
                f"{self.max_workers}: raise virtual_shares to it."
            )
        if self.shares > self.global_batch:
            raise InvalidInput(
                f"a step of {self.global_batch} rows cannot be cut into virtual_shares={self.shares}: raise "
                "batch_size, or lower virtual_shares."
            )
        if self.compile_model:
            raise InvalidInput(
                "determinism='bitwise' cannot compile the model, since compiled code depends on the shapes that a "
                "worker has seen: leave compile_model out."
            )
        if self.gradient_compression is not None:
            raise InvalidInput(
                "determinism='bitwise' sends gradients as they are: leave gradient_compression out."
            )


def _to_json_value(value: Any) -> Any:
    return [_to_json_value(each) for each in value] if isinstance(value, tuple) else value
