"""From the parameters of an estimator to one checked request; each mistake is one sentence, before any Spark job.

`FitConfig` checks what training needs; here are the parameters of the driver alone. The objects of the user are
checked in `torch_objects.py` and `keras_objects.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from spark_elastic.config import ElasticConfig, changes_setting, from_env
from spark_elastic.data.store import parse_store_url
from spark_elastic.errors import InvalidInput, suggest_name
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.runs import owned_run
from spark_elastic.training.fit_config import (
    FitConfig,
    check_flag,
    check_whole_number,
    describe_type,
)
from spark_elastic.training.spec import UserObjects
from spark_elastic.training.transformation import reshape_results

MATERIALIZE = ("auto", "always", "never")

O = TypeVar("O", bound=UserObjects)  # noqa: E741


@dataclass(frozen=True, kw_only=True)
class FitRequest(Generic[O]):
    """What one `fit` was asked for, checked."""

    # The parameters of the training, which the workers receive as they are.
    config: FitConfig
    # The user's model, optimizer, losses and so on.
    objects: O
    # Url or path of the store; None: a folder of this machine.
    store: str | None = None
    # fsspec's options for the store, which may hold credentials.
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # What happens to rows with nulls and NaN.
    missing: MissingValues = field(default_factory=MissingValues)
    # Whether a DataFrame's rows are written to the store: "auto", "always" or "never".
    materialize: str = "auto"
    # Name of the run in the store; None: a new one.
    run_id: str | None = None
    # 0: silent; 1: progress and what workers print; 2: also the log.
    verbose: int = 1
    # Whether the written rows stay in the store for later fits.
    keep_data: bool = False
    # Called on the driver with each report of progress.
    on_progress: Callable[[Mapping[str, Any]], None] | None = None
    # Ports, addresses, time limits.
    elastic: ElasticConfig = field(default_factory=ElasticConfig)


def build_request(
    values: Mapping[str, Any], check_objects: Callable[[Mapping[str, Any]], O]
) -> FitRequest[O]:
    """Check the parameters of an estimator, by name. check_objects: checks the user's objects among them.

    Raises:
        InvalidInput: the first mistake, in one sentence.
    """
    config = FitConfig.from_params(values)
    objects = _reshape_inputs(check_objects(values), config)
    if config.transformation_workers and objects.transformation is None:
        raise InvalidInput(
            "transformation_workers apply transformation_fn, which is missing: give it, or leave them out."
        )
    store, run_id = values["store"], values["run_id"]
    if run_id is not None:
        owned_run.check_name(run_id)
    return FitRequest(
        config=config,
        objects=objects,
        store=None if store is None else parse_store_url(store),
        storage_options=values["storage_options"] or {},
        missing=MissingValues.parse(values["missing"]),
        materialize=_check_materialize(values["materialize"]),
        run_id=run_id,
        verbose=check_whole_number("verbose", values["verbose"]),
        keep_data=check_flag("keep_data", values["keep_data"]),
        on_progress=_check_listener(values["on_progress"]),
        elastic=_build_elastic_config(values["config"], values["settings"]),
    )


def _reshape_inputs(objects: O, config: FitConfig) -> O:
    """With a transformation, `input_shapes` are the shapes of what it returns."""
    if config.input_shapes is None or objects.transformation is None:
        return objects
    shapes = dict(zip(config.feature_cols, config.input_shapes, strict=True))
    found: O = dataclasses.replace(  # type: ignore[type-var]
        objects, transformation=reshape_results(objects.transformation, shapes)
    )
    return found


def _check_materialize(value: Any) -> str:
    if value not in MATERIALIZE:
        raise InvalidInput(f"materialize must be one of {', '.join(map(repr, MATERIALIZE))}; got {value!r}.")
    return str(value)


def _check_listener(listener: Any) -> Any:
    if listener is not None and not callable(listener):
        raise InvalidInput(f"on_progress must be a function of one dict; got {describe_type(listener)}.")
    return listener


def _build_elastic_config(config: Any, settings: Mapping[str, Any] | None) -> ElasticConfig:
    settings = {name: value for name, value in (settings or {}).items() if changes_setting(name, value)}
    if config is None:
        return from_env(**settings)
    if not isinstance(config, ElasticConfig):
        raise InvalidInput(f"config must be an ElasticConfig; got {describe_type(config)}.")
    known = {field.name for field in dataclasses.fields(ElasticConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidInput(
            f"unknown setting {unknown[0]!r}{suggest_name(unknown[0], known)}: docs/params.md lists them."
        )
    return dataclasses.replace(config, **settings)
