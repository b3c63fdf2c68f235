"""What an estimator may be asked: each mistake is one sentence, said before any Spark job starts.

Pure apart from the optimizer's factory, which is tried on a copy of the model. Knows torch, not Spark.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spark_elastic.config import ElasticConfig, from_env
from spark_elastic.errors import InvalidInput
from spark_elastic.state import attempts


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one `fit` was asked for, checked. `max_workers` is filled in; `batch_size` is per worker."""

    model: torch.nn.Module
    optimizer: Any
    loss: Callable[..., Any]
    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    sample_weight_col: str | None
    input_shapes: tuple[tuple[int, ...], ...] | None
    output_col: str
    batch_size: int
    epochs: int
    num_workers: int
    min_workers: int
    max_workers: int
    store: str | None
    seed: int
    shuffle: bool
    gradient_clip_norm: float | None
    gradient_clip_value: float | None
    run_id: str | None
    verbose: int
    keep_data: bool
    on_progress: Callable[[Mapping[str, Any]], None] | None
    config: ElasticConfig

    @property
    def global_batch(self) -> int:
        """Rows of one step, whatever the world's size."""
        return self.batch_size * self.num_workers


def checked(values: Mapping[str, Any]) -> Request:
    """The request behind an estimator's parameters, by name.

    Raises:
        InvalidInput: the first mistake, in one sentence.
    """
    values = dict(values)
    model = _model(values["model"])
    store, run_id = values["store"], values["run_id"]
    if run_id is not None:
        attempts.check_name(run_id)
    return Request(
        model=model,
        optimizer=_optimizer(values["optimizer"], model),
        loss=_loss(values["loss"]),
        **_columns(values),
        **_workers(values),
        batch_size=_whole(values, "batch_size", least=1),
        epochs=_whole(values, "epochs", least=1),
        gradient_clip_norm=_positive(values, "gradient_clip_norm"),
        gradient_clip_value=_positive(values, "gradient_clip_value"),
        store=None if store is None else str(store),
        seed=_whole(values, "seed", least=0),
        shuffle=bool(values["shuffle"]),
        run_id=run_id,
        verbose=_whole(values, "verbose", least=0),
        keep_data=bool(values["keep_data"]),
        on_progress=_listener(values["on_progress"]),
        config=_config(values["config"], values["settings"]),
    )


def _model(model: Any) -> torch.nn.Module:
    if isinstance(model, type):
        raise InvalidInput(f"model is the class {model.__name__}; pass an instance of it.")
    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(f"model must be a torch.nn.Module; got {_kind(model)}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInput("the model has no parameter that requires a gradient: there is nothing to train.")
    return model


def _loss(loss: Any) -> Callable[..., Any]:
    if isinstance(loss, type):
        raise InvalidInput(f"loss is the class {loss.__name__}; pass an instance: loss={loss.__name__}().")
    if not callable(loss):
        raise InvalidInput(f"loss must be a function or module of (output, label); got {_kind(loss)}.")
    return loss  # type: ignore[no-any-return]


def _optimizer(optimizer: Any, model: torch.nn.Module) -> Any:
    if isinstance(optimizer, torch.optim.Optimizer):
        _same_parameters(optimizer, model)
        return optimizer
    if isinstance(optimizer, type) or not callable(optimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else _kind(optimizer)
        raise InvalidInput(
            f"optimizer must be a torch optimizer over model.parameters() or a function such as "
            f"lambda params: SGD(params, lr=0.1); got {name}."
        )
    trial = copy.deepcopy(model)
    made = optimizer(trial.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidInput(
            f"optimizer must return a torch optimizer when called with parameters; it returned {_kind(made)}."
        )
    _same_parameters(made, trial)
    return optimizer


def _same_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Both directions: no parameter of another model, and none of this one's left out."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = dict(model.named_parameters())
    foreign = len(held - {id(parameter) for parameter in own.values()})
    if foreign:
        raise InvalidInput(
            f"the optimizer holds {foreign} of {len(held)} parameters that are not the model's: make it from the "
            "parameters of the model that is passed (of this very object, not of a copy)."
        )
    trainable = [name for name, parameter in own.items() if parameter.requires_grad]
    missing = [name for name in trainable if id(own[name]) not in held]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise InvalidInput(
            f"the optimizer lacks {len(missing)} of the model's {len(trainable)} trainable parameters ({shown}): add "
            "them, or set requires_grad=False on what is to stay as it is."
        )


def _columns(values: Mapping[str, Any]) -> dict[str, Any]:
    features, labels = tuple(values["feature_cols"] or ()), tuple(values["label_cols"] or ())
    weight, shapes = values["sample_weight_col"], values["input_shapes"]
    if not features:
        raise InvalidInput("feature_cols is empty: name at least one column.")
    if not labels:
        raise InvalidInput("label_cols is empty: name at least one column.")
    for name in (*features, *labels):
        if (*features, *labels).count(name) > 1:
            raise InvalidInput(f"column {name!r} is named twice in feature_cols and label_cols.")
    if weight is not None and not isinstance(weight, str):
        raise InvalidInput(f"sample_weight_col must be a column's name; got {_kind(weight)}.")
    if not values["output_col"]:
        raise InvalidInput("output_col must be a column's name.")
    return {
        "feature_cols": features,
        "label_cols": labels,
        "sample_weight_col": weight,
        "input_shapes": None if shapes is None else _shapes(shapes, features),
        "output_col": str(values["output_col"]),
    }


def _shapes(shapes: Any, features: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    try:
        found = tuple(tuple(operator.index(size) for size in shape) for shape in shapes)
    except TypeError:
        raise InvalidInput(
            f"input_shapes must be one shape per feature column, such as [(1, 28, 28)]; got {shapes!r}."
        ) from None
    if len(found) != len(features):
        raise InvalidInput(f"input_shapes has {len(found)} shapes for {len(features)} feature columns.")
    if any(size < 1 for shape in found for size in shape):
        raise InvalidInput(f"input_shapes must be of sizes of 1 or more; got {shapes!r}.")
    return found


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


def _positive(values: Mapping[str, Any], name: str) -> float | None:
    value = values[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidInput(f"{name} must be a number above 0, or None; got {value!r}.")
    return float(value)


def _listener(listener: Any) -> Any:
    if listener is not None and not callable(listener):
        raise InvalidInput(f"on_progress must be a function of one dict; got {_kind(listener)}.")
    return listener


def _config(config: Any, settings: Mapping[str, Any] | None) -> ElasticConfig:
    settings = {name: value for name, value in (settings or {}).items() if value is not None}
    if config is None:
        return from_env(**settings)
    if not isinstance(config, ElasticConfig):
        raise InvalidInput(f"config must be an ElasticConfig; got {_kind(config)}.")
    known = {field.name for field in dataclasses.fields(ElasticConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidInput(f"unknown setting {unknown[0]!r}; there are: {', '.join(sorted(known))}.")
    return dataclasses.replace(config, **settings)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:40]!r})" if isinstance(value, str) else type(value).__name__
