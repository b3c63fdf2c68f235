"""From the parameters of an estimator to one checked request; each mistake is one sentence, before any Spark job.

`FitConfig` checks what training needs; here are the parameters of the driver alone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from spark_elastic.checks import FLAG, FUNCTION, VERBOSE, make_choice, make_kind
from spark_elastic.config import ElasticConfig, build_config
from spark_elastic.data.store import parse_store_url
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.runs import owned_run
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.spec import UserObjects
from spark_elastic.training.transformation import reshape_results

MATERIALIZE = ("auto", "always", "never")

O = TypeVar("O", bound=UserObjects)  # noqa: E741
M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class FitRequest(Generic[O]):
    """What one `fit` was asked for, checked."""

    config: FitConfig  # the parameters of the training, which the workers receive as they are
    objects: O  # the user's model, optimizer, losses and so on
    store: str | None = None  # url or path of the store; None: a folder of this machine
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # fsspec's, for the store
    missing: MissingValues = field(default_factory=MissingValues)  # what happens to rows with nulls and NaN
    materialize: str = "auto"  # whether a DataFrame's rows are written: "auto", "always" or "never"
    run_id: str | None = None  # name of the run in the store; None: a new one
    verbose: int = 1  # 0: silent; 1: progress and what workers print; 2: also the log
    keep_data: bool = False  # whether the written rows stay in the store for later fits
    on_progress: Callable[[Mapping[str, Any]], None] | None = None  # gets each report of progress
    elastic: ElasticConfig = field(default_factory=ElasticConfig)  # Ports, addresses, time limits


# Only one thread at a time calls a user's model factory: initial weights come from the process's random generators, and
# parallel fits of several folds call the factories in threads.
MODEL_FACTORY_LOCK = threading.RLock()


def build_request(
    values: Mapping[str, Any], check_objects: Callable[[Mapping[str, Any]], O]
) -> FitRequest[O]:
    """Check the parameters of an estimator, by name; `check_objects` those that are objects."""
    config = FitConfig.from_params(values)
    objects, shapes = check_objects(values), config.data.input_shapes
    if shapes is not None and objects.transformation is not None:  # they are of what it returns
        named = dict(zip(config.data.feature_cols, shapes, strict=True))
        change = {"transformation": reshape_results(objects.transformation, named)}
        objects = dataclasses.replace(objects, **change)  # type: ignore[type-var]
    if config.transformation.transformation_workers and objects.transformation is None:
        raise InvalidInput("transformation_workers apply transformation_fn, which is missing: give both.")
    store, run_id = values["store"], values["run_id"]
    if run_id is not None:
        owned_run.check_name(run_id)
    return FitRequest(
        config=config,
        objects=objects,
        store=None if store is None else parse_store_url(store),
        storage_options=values["storage_options"] or {},
        missing=MissingValues.parse(values["missing"]),
        materialize=make_choice(*MATERIALIZE)("materialize", values["materialize"]),
        run_id=run_id,
        verbose=VERBOSE("verbose", values["verbose"]),
        keep_data=FLAG("keep_data", values["keep_data"]),
        on_progress=FUNCTION.or_none()("on_progress", values["on_progress"]),
        elastic=build_config(values["config"], values["settings"] or {}),
    )


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


def build_model(given: Any, kind: type[M], words: str) -> M:
    """The user's model, or what the user's function makes, with the random numbers that the caller has seeded."""
    if not isinstance(given, kind) and not isinstance(given, type) and callable(given):
        with name_failing("model"):
            given = given()
    if isinstance(given, type):
        raise InvalidInput(f"model is the class {given.__name__}; pass an instance of it.")
    model: M = make_kind(f"{words} or a function that makes one", kind)("model", given)
    return model


def list_callbacks(given: Any, kind: type[M], words: str) -> tuple[M, ...]:
    """The user's callbacks, one or several. Raises InvalidInput if one is none."""
    several = given if isinstance(given, Sequence) else () if given is None else (given,)
    check = make_kind(f"instances of {words}", kind)
    return tuple(check("callbacks", callback) for callback in several)
