"""The parameters of one fit, checked: a frozen record that the driver and all workers use as it is.

`FitConfig.from_params` checks each value and says the first mistake in one sentence. A new parameter of training is
declared here and in `estimators/params.py`; a run is bound to it unless it is marked `may_change`. Values only.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_elastic.data.reading.readers import check_reader
from spark_elastic.errors import ElasticError, InvalidInput

Shapes = tuple[tuple[int, ...], ...]
Check = Callable[[str, Any], Any]  # (name, value) -> the value to keep; raises InvalidInput


@contextmanager
def name_failing(parameter: str) -> Iterator[None]:
    """A user's function that raises inside the block raises an InvalidInput with the name of its parameter."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise InvalidInput(
            f"the function given as {parameter} fails, with {reason}: call it yourself, as this does, to see where."
        ) from error


def describe_type(value: Any) -> str:
    """The type of a value for a message; of a string also its beginning."""
    return f"{type(value).__name__} ({str(value)[:40]!r})" if isinstance(value, str) else type(value).__name__


def check_whole_number(name: str, value: Any, least: int = 0) -> int:
    try:
        number = None if isinstance(value, bool) and name != "verbose" else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise InvalidInput(f"{name} must be a whole number of {least} or more; got {value!r}.")
    return number


def check_seed(name: str, value: Any, bits: int = 64) -> int:
    """The seed, of at most as many bits as the framework's generators take."""
    number = check_whole_number(name, value)
    if number >= 2**bits:
        raise InvalidInput(f"{name} must be a whole number below 2**{bits}; got {value!r}.")
    return number


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidInput(f"{name} must be True or False; got {value!r}.")
    return bool(value)


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(map(repr, allowed))}, or None; got {value!r}.")
    return None if value is None else str(value)


def _check_count(name: str, value: Any) -> int:
    return check_whole_number(name, value, least=1)


def _check_optional_count(name: str, value: Any) -> int | None:
    return None if value is None else _check_count(name, value)


def _check_16_bit(name: str, value: Any) -> str | None:
    return check_choice(name, value, ("bf16", "fp16"))


def _check_determinism(name: str, value: Any) -> str | None:
    return check_choice(name, value, ("bitwise",))


def _check_loss_scope(name: str, value: Any) -> str | None:
    return check_choice(name, value, ("worker",))


def _check_row_order(name: str, value: Any) -> str | None:
    return check_choice(name, value, ("hash", "table"))


def _check_positive(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidInput(f"{name} must be a number above 0, or None; got {value!r}.")
    return float(value)


def _check_rate(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidInput(f"{name} must be a number of 0 or more, or None; got {value!r}.")
    return float(value)


def _check_columns(name: str, value: Any) -> tuple[str, ...]:
    columns = tuple(value or ())
    if not columns:
        raise InvalidInput(f"{name} is empty: name at least one column.")
    for column in columns:
        if columns.count(column) > 1:  # the label of an autoencoder may be a feature, too
            raise InvalidInput(f"column {column!r} is named twice in {name}.")
    return columns


def _check_column(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{name} must be a column's name; got {describe_type(value)}.")
    return value


def _check_shapes(name: str, value: Any) -> Shapes | None:
    if value is None:
        return None
    try:
        found = tuple(tuple(operator.index(size) for size in shape) for shape in value)
    except TypeError:
        role = name.partition("_")[0].replace("input", "feature")
        raise InvalidInput(
            f"{name} must be one shape per {role} column, such as [(1, 28, 28)]; got {value!r}."
        ) from None
    found = tuple(shape[1:] if shape[:1] == (-1,) else shape for shape in found)  # Horovod's include the rows
    if any(size < 1 for shape in found for size in shape):
        raise InvalidInput(f"{name} must be of sizes of 1 or more; got {value!r}.")
    return found


def _check_validation(name: str, value: Any) -> float | str | None:
    if value is None or value == 0 or (isinstance(value, str) and value):
        return value or None
    if isinstance(value, bool) or not isinstance(value, float) or not 0 < value < 1:
        raise InvalidInput(
            f"{name} must be a fraction of the rows below 1, or the name of a column; got {value!r}."
        )
    return value


def _check_workers(name: str, value: Any) -> int:
    if value is None:
        raise InvalidInput(f"{name} is missing: say how many workers are to train.")
    return _check_count(name, value)


def _check_pool(name: str, value: Any) -> str:
    return check_choice(name, value, ("process", "thread")) or "process"


def _check_reader(name: str, value: Any) -> str:
    check_reader(value)
    return str(value)


def _param(check: Check, default: Any = dataclasses.MISSING, *, may_change: bool = False) -> Any:
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
    # Columns fed to the loss.
    label_cols: tuple[str, ...] = _param(_check_columns)
    # Column with a weight for each row, or None.
    sample_weight_col: str | None = _param(_check_column, None)
    # Shape of one row of each feature column as the model takes it; None: as it is stored.
    input_shapes: tuple[tuple[int, ...], ...] | None = _param(_check_shapes, None)
    # The same for label columns.
    label_shapes: tuple[tuple[int, ...], ...] | None = _param(_check_shapes, None)
    # Rows to validate with: a fraction, or the name of the column that marks them; None: no validation.
    validation: float | str | None = _param(_check_validation, None)
    # Rows of one forward pass of a worker.
    batch_size: int = _param(_check_count, 32)
    # The same in validation; None: batch_size.
    val_batch_size: int | None = _param(_check_optional_count, None, may_change=True)
    # Forward passes of a worker whose gradients are one step.
    backward_passes_per_step: int = _param(_check_count, 1)
    # Passes over the data.
    epochs: int = _param(_check_count, 1, may_change=True)
    # Workers at the start; the global batch is made for them.
    num_workers: int = _param(_check_workers, 1, may_change=True)
    # Fewest workers to continue with.
    min_workers: int = _param(_check_count, 1, may_change=True)
    # Most workers ever; None stands for num_workers and is replaced by it.
    max_workers: int = _param(_check_optional_count, None, may_change=True)
    # Seed of the order of rows and of the workers' random numbers.
    seed: int = _param(check_seed, 0)
    # Whether each epoch has its own order of rows.
    shuffle: bool = _param(check_flag, True)
    # Order in which a table's rows are written: "hash" or "table"; None: "hash" if they are shuffled.
    row_order: str | None = _param(_check_row_order, None)
    # Streams that an epoch is cut into, as far as memory and rows of a step suffice; None: 16, or 2 for each worker.
    lanes: int | None = _param(_check_optional_count, None)
    # Learning rate of all parameter groups; None: the optimizer's own.
    learning_rate: float | None = _param(_check_rate, None)
    # "bitwise": the weights have the same bits for any number of workers; None: the same up to rounding.
    determinism: str | None = _param(_check_determinism, None)
    # Parts that a step is cut into in bitwise mode, each computed by one worker.
    virtual_shares: int = _param(_check_count, 8)
    # So many steps after each other one virtual share is computed by other workers, too, and compared; None: none is.
    verify_steps: int | None = _param(_check_optional_count, None, may_change=True)
    # Whose rows a loss that compares rows sees: "worker", those of one worker; None: such a loss is refused.
    loss_scope: str | None = _param(_check_loss_scope, None, may_change=True)
    # Whether all learning rates are multiplied by num_workers, once.
    scale_lr: bool = _param(check_flag, False)
    # Largest 2-norm of all gradients together; None: no limit.
    gradient_clip_norm: float | None = _param(_check_positive, None)
    # Largest absolute value of an element of a gradient; None: no limit.
    gradient_clip_value: float | None = _param(_check_positive, None)
    # Forward passes under autocast: "bf16", "fp16" or None.
    precision: str | None = _param(_check_16_bit, None)
    # Whether workers compile the model's forward pass.
    compile_model: bool = _param(check_flag, False, may_change=True)
    # Type in which float32 gradients are sent: "bf16", "fp16" or None.
    gradient_compression: str | None = _param(_check_16_bit, None)
    # What reads the rows, a name of `data.reading.readers`.
    reader: str = _param(_check_reader, "arrow", may_change=True)
    # Processes or threads of a worker that apply transformation_fn; 0: the training thread does.
    transformation_workers: int = _param(check_whole_number, 0, may_change=True)
    # Which of them: "process" or "thread".
    transformation_pool: str = _param(_check_pool, "process", may_change=True)
    # Whether slow workers get fewer rows of a step.
    balance_rows: bool = _param(check_flag, False, may_change=True)
    # Whether the first loss of NaN or infinity ends the training.
    terminate_on_nan: bool = _param(check_flag, True, may_change=True)
    # Whether a worker keeps all decoded rows, as far as memory allows.
    inmemory_cache_all: bool = _param(check_flag, False, may_change=True)

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
        config._check_world()
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
        return {
            field.name: _to_json_value(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if not field.metadata["may_change"]
        }

    def _check_world(self) -> None:
        number, least, most = self.num_workers, self.min_workers, self.max_workers
        if least > number:
            raise InvalidInput(
                f"min_workers is {least} and num_workers {number}: the first must not be above the second."
            )
        if number > most:
            raise InvalidInput(
                f"num_workers is {number} and max_workers {most}: the first must not be above the second."
            )

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
