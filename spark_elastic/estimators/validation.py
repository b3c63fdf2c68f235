"""What an estimator may be asked: each mistake is one sentence, said before any Spark job starts.

Owns what numbers and names are allowed; the user's objects are checked in `objects`. Pure but for the user's factories.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spark_elastic.config import ElasticConfig, from_env, said
from spark_elastic.data.reading.readers import check_reader
from spark_elastic.data.store import parse_store_url
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.predictor import ACTIVATIONS
from spark_elastic.spark.dataframes.scan import MissingValues
from spark_elastic.state import run_lease
from spark_elastic.training.spec import with_shapes

# How messages name values. Pure.


def describe_type(value: Any) -> str:
    """A value in a message."""
    return f"{type(value).__name__} ({str(value)[:40]!r})" if isinstance(value, str) else type(value).__name__


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """What one `fit` was asked for, checked. `max_workers` is filled in; `batch_size` is per worker and backward pass.

    brought: what the user brings to the framework, with `transformation`, a function of columns or None.
    validation: a fraction of the rows, or the name of the column that says which; None for none.
    """

    brought: Any
    learning_rate: float | None
    scale_lr: bool
    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    sample_weight_col: str | None
    input_shapes: tuple[tuple[int, ...], ...] | None
    label_shapes: tuple[tuple[int, ...], ...] | None
    validation: float | str | None
    batch_size: int
    val_batch_size: int | None
    backward_passes_per_step: int
    epochs: int
    num_workers: int
    min_workers: int
    max_workers: int
    store: str | None
    storage_options: Mapping[str, Any] = field(repr=False)
    missing: MissingValues
    seed: int
    shuffle: bool
    gradient_clip_norm: float | None
    gradient_clip_value: float | None
    precision: str | None
    gradient_compression: str | None
    reader: str
    terminate_on_nan: bool
    inmemory_cache_all: bool
    run_id: str | None
    verbose: int
    keep_data: bool
    on_progress: Callable[[Mapping[str, Any]], None] | None
    config: ElasticConfig

    @property
    def global_batch(self) -> int:
        """Rows of one step, whatever the world's size."""
        return self.batch_size * self.backward_passes_per_step * self.num_workers

    @property
    def used_cols(self) -> list[str]:
        """Columns that workers read."""
        return [*self.feature_cols, *self.label_cols, *filter(None, [self.sample_weight_col])]


def build_request(values: Mapping[str, Any], brought: Callable[[Mapping[str, Any]], Any]) -> FitRequest:
    """The request that an estimator's parameters (by name) make. brought: checks the user's objects among them.

    Raises:
        InvalidInput: the first mistake, in one sentence.
    """
    values = dict(values)
    seed, columns = _whole(values, "seed", least=0), _columns(values)
    objects = _reshaping(brought(values), columns)
    store, run_id = values["store"], values["run_id"]
    if run_id is not None:
        run_lease.check_name(run_id)
    return FitRequest(
        brought=objects,
        learning_rate=values["learning_rate"],
        scale_lr=_flag(values, "scale_lr"),
        **columns,
        **_workers(values),
        validation=_validation(values["validation"]),
        batch_size=_whole(values, "batch_size", least=1),
        val_batch_size=None
        if values["val_batch_size"] is None
        else _whole(values, "val_batch_size", least=1),
        backward_passes_per_step=_whole(values, "backward_passes_per_step", least=1),
        epochs=_whole(values, "epochs", least=1),
        gradient_clip_norm=_positive(values, "gradient_clip_norm"),
        gradient_clip_value=_positive(values, "gradient_clip_value"),
        precision=_one_of(values, "precision", ("bf16", "fp16")),
        gradient_compression=_one_of(values, "gradient_compression", ("bf16", "fp16")),
        reader=_reader(values["reader"]),
        terminate_on_nan=_flag(values, "terminate_on_nan"),
        inmemory_cache_all=_flag(values, "inmemory_cache_all"),
        store=None if store is None else parse_store_url(store),
        storage_options=values["storage_options"] or {},
        missing=_missing(values["missing"]),
        seed=seed,
        shuffle=_flag(values, "shuffle"),
        run_id=run_id,
        verbose=_whole(values, "verbose", least=0),
        keep_data=_flag(values, "keep_data"),
        on_progress=_listener(values["on_progress"]),
        config=_config(values["config"], values["settings"]),
    )


def _reshaping(objects: Any, columns: Mapping[str, Any]) -> Any:
    """`input_shapes` are of what a function returns, where there is one."""
    shapes = columns["input_shapes"]
    if shapes is None or objects.transformation is None:
        return objects
    named = dict(zip(columns["feature_cols"], shapes, strict=True))
    return dataclasses.replace(objects, transformation=with_shapes(objects.transformation, named))


def _columns(values: Mapping[str, Any]) -> dict[str, Any]:
    features, labels = tuple(values["feature_cols"] or ()), tuple(values["label_cols"] or ())
    weight, shapes, label_shapes = (values[n] for n in ("sample_weight_col", "input_shapes", "label_shapes"))
    if not features:
        raise InvalidInput("feature_cols is empty: name at least one column.")
    if not labels:
        raise InvalidInput("label_cols is empty: name at least one column.")
    for role, names in (("feature_cols", features), ("label_cols", labels)):
        for name in names:
            if names.count(name) > 1:  # an autoencoder's may be in both
                raise InvalidInput(f"column {name!r} is named twice in {role}.")
    if weight is not None and not isinstance(weight, str):
        raise InvalidInput(f"sample_weight_col must be a column's name; got {describe_type(weight)}.")
    _predictions(values)
    return {
        "feature_cols": features,
        "label_cols": labels,
        "sample_weight_col": weight,
        "input_shapes": None if shapes is None else _shapes(shapes, features, "input_shapes", "feature"),
        "label_shapes": None
        if label_shapes is None
        else _shapes(label_shapes, labels, "label_shapes", "label"),
    }


def _predictions(values: Mapping[str, Any]) -> None:
    """What `transform` will be asked for; whether it fits the model's outputs is known once there are some."""
    columns = [values["prediction_col"], *(values["output_cols"] or ())]
    if values["probability_col"] is not None:
        columns.append(values["probability_col"])
    for name in columns:
        if not isinstance(name, str) or not name:
            raise InvalidInput(
                f"prediction_col, probability_col and output_cols must be names of columns; got {name!r}."
            )
    if values["probability_col"] is not None and values["output_cols"] is not None:
        raise InvalidInput("probability_col and output_cols exclude each other: leave one out.")
    _one_of(values, "activation", ACTIVATIONS)


def _shapes(shapes: Any, columns: tuple[str, ...], name: str, role: str) -> tuple[tuple[int, ...], ...]:
    try:
        found = tuple(tuple(operator.index(size) for size in shape) for shape in shapes)
    except TypeError:
        raise InvalidInput(
            f"{name} must be one shape per {role} column, such as [(1, 28, 28)]; got {shapes!r}."
        ) from None
    found = tuple(shape[1:] if shape[:1] == (-1,) else shape for shape in found)  # Horovod's are of all rows
    if len(found) != len(columns):
        raise InvalidInput(f"{name} has {len(found)} shapes for {len(columns)} {role} columns.")
    if any(size < 1 for shape in found for size in shape):
        raise InvalidInput(f"{name} must be of sizes of 1 or more; got {shapes!r}.")
    return found


def _validation(value: Any) -> float | str | None:
    if value is None or value == 0 or (isinstance(value, str) and value):
        return value or None
    if isinstance(value, bool) or not isinstance(value, float) or not 0 < value < 1:
        raise InvalidInput(
            f"validation must be a fraction of the rows below 1, or the name of a column; got {value!r}."
        )
    return value


def _one_of(values: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str | None:
    value = values.get(name)
    if value is not None and value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(map(repr, allowed))}, or None; got {value!r}.")
    return value


def _workers(values: Mapping[str, Any]) -> dict[str, Any]:
    if values["num_workers"] is None:
        raise InvalidInput("num_workers is missing: say how many workers are to train.")
    number = _whole(values, "num_workers", least=1)
    least = _whole(values, "min_workers", least=1)
    most = number if values["max_workers"] is None else _whole(values, "max_workers", least=1)
    if least > most:
        raise InvalidInput(
            f"min_workers is {least} and max_workers {most}: the first must not be above the second."
        )
    if not least <= number <= most:
        raise InvalidInput(
            f"num_workers is {number}, outside of min_workers {least} to max_workers {most}: change one of them."
        )
    return {"num_workers": number, "min_workers": least, "max_workers": most}


def _whole(values: Mapping[str, Any], name: str, least: int) -> int:
    value = values[name]
    try:
        number = None if isinstance(value, bool) and name != "verbose" else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise InvalidInput(f"{name} must be a whole number of {least} or more; got {value!r}.")
    return number


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values[name]
    if not isinstance(value, bool | np.bool_):
        raise InvalidInput(f"{name} must be True or False; got {value!r}.")
    return bool(value)


def _positive(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)  # None: the framework has no such parameter
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidInput(f"{name} must be a number above 0, or None; got {value!r}.")
    return float(value)


def _reader(name: Any) -> str:
    check_reader(name)
    return str(name)


def _missing(value: Any) -> MissingValues:
    wanted = {"nulls": value} if isinstance(value, str) else value
    if not isinstance(wanted, Mapping) or not set(wanted) <= {"nulls", "nans"}:
        raise InvalidInput(f"missing must be 'refuse', 'drop', or a dict of nulls and nans; got {value!r}.")
    return MissingValues(**wanted)


def _listener(listener: Any) -> Any:
    if listener is not None and not callable(listener):
        raise InvalidInput(f"on_progress must be a function of one dict; got {describe_type(listener)}.")
    return listener


def _config(config: Any, settings: Mapping[str, Any] | None) -> ElasticConfig:
    settings = {name: value for name, value in (settings or {}).items() if said(name, value)}
    if config is None:
        return from_env(**settings)
    if not isinstance(config, ElasticConfig):
        raise InvalidInput(f"config must be an ElasticConfig; got {describe_type(config)}.")
    known = {field.name for field in dataclasses.fields(ElasticConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidInput(f"unknown setting {unknown[0]!r}; there are: {', '.join(sorted(known))}.")
    return dataclasses.replace(config, **settings)
