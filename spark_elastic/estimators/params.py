"""The parameters of the torch estimator as Params of Spark ML: keywords, `setX`/`getX`, `copy`, param maps.

Owns names, documentation and defaults. What values are allowed is `validation.py`'s, when `fit` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

P = TypeVar("P", bound=type[Params])


def names(value: Any) -> list[str]:
    """One column name or several, as a list."""
    return [value] if isinstance(value, str) else [str(name) for name in value]


def declare(doc: str, converter: Callable[[Any], Any] | None = None) -> Any:
    """A Param whose name is that of the attribute it is assigned to."""
    return _Declaration(doc, converter)


class _Declaration:
    """Becomes a Param once the class body that holds it says its name."""

    def __init__(self, doc: str, converter: Callable[[Any], Any] | None) -> None:
        self._doc = doc
        self._converter = converter

    def __set_name__(self, owner: type, name: str) -> None:
        parent = Params._dummy()  # type: ignore[no-untyped-call,unused-ignore]
        setattr(owner, name, Param(parent, name, self._doc, self._converter))


def with_accessors(owner: P) -> P:
    """Add `setBatchSize(value)` and `getBatchSize()` for a Param `batch_size`, as Spark ML users expect."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, Param):
            camel = "".join(part.capitalize() for part in name.split("_"))
            _add(owner, f"set{camel}", _setter(name), f"Set `{name}`: {value.doc}")
            _add(owner, f"get{camel}", _getter(name), f"`{name}`: {value.doc}")
    return owner


def _add(owner: type, name: str, method: Any, doc: str) -> None:
    if name not in vars(owner):
        method.__name__, method.__qualname__, method.__doc__ = name, f"{owner.__name__}.{name}", doc
        setattr(owner, name, method)


def _setter(name: str) -> Callable[[Any, Any], Any]:
    def set_param(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    return set_param


def _getter(name: str) -> Callable[[Any], Any]:
    def get_param(self: Any) -> Any:
        return self.getOrDefault(name)

    return get_param


@with_accessors
class ColumnParams(Params):
    """Which columns go in and what shapes they have; shared by estimator and fitted model."""

    feature_cols: Param[Sequence[str]] = declare("columns fed to the model's forward, in its order", names)
    label_cols: Param[Sequence[str]] = declare("columns fed to the loss after the model's output", names)
    sample_weight_col: Param[str] = declare("column of row weights, or None")
    input_shapes: Param[Any] = declare(
        "shape of one row of each feature column, such as [(1, 28, 28)], or None"
    )
    output_col: Param[str] = declare("column that `transform` adds")


@with_accessors
class TorchParams(ColumnParams):
    """What `ElasticTorchEstimator` can be told."""

    model: Param[Any] = declare("the torch.nn.Module to train; left as it is")
    optimizer: Param[Any] = declare(
        "a torch optimizer over the model's parameters, or a function of parameters to one"
    )
    loss: Param[Any] = declare("function or module of (output, *labels)")
    batch_size: Param[int] = declare("rows per worker and step; batch_size × num_workers rows are one step")
    epochs: Param[int] = declare("passes over the data")
    num_workers: Param[int] = declare("workers wanted at the start")
    min_workers: Param[int] = declare("fewest workers to go on with")
    max_workers: Param[int] = declare("most workers ever; default num_workers")
    store: Param[str] = declare("path or url for data and models that driver and executors share")
    seed: Param[int] = declare("seed of the order of rows and of the workers' random numbers")
    shuffle: Param[bool] = declare("whether each epoch has an order of its own")
    gradient_clip_norm: Param[float] = declare("largest norm of all gradients together, or None")
    gradient_clip_value: Param[float] = declare("largest absolute value of a gradient's element, or None")
    run_id: Param[str] = declare("name of the run in the store; default a new one for each fit")
    verbose: Param[int] = declare("0: silent; 1: progress, worlds and what workers print")
    keep_data: Param[bool] = declare("keep the materialised data in the store for the next fit")
    on_progress: Param[Any] = declare(
        "function called on the driver with each report of progress (a dict), or None"
    )
    config: Param[Any] = declare("an ElasticConfig, or None for the environment's")
    settings: Param[Any] = declare("single settings of ElasticConfig that go before `config`")
