"""Keras 3 on elastic workers: `import spark_elastic.keras as hvd` speaks Horovod's Keras API. Knows no Spark.

Names that need Keras, and those shared by all frameworks, which need the engine, are imported on first use: a fitted
model needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_SHARED = "spark_elastic.horovod.ops.horovod_names"
# Module of `spark_elastic.horovod` -> the public names that it defines, with blanks between them.
_DEFINED = {
    "keras.optimizer": "DistributedOptimizer PartialDistributedOptimizer load_model",
    "keras.values": "allgather allreduce broadcast broadcast_global_variables broadcast_variables reducescatter",
    "ops.operations": "allgather_object broadcast_object",
}
_EXPORTS = {
    name: f"spark_elastic.horovod.{module}" for module, names in _DEFINED.items() for name in names.split()
}
_MODULES = ("callbacks", "elastic")

if TYPE_CHECKING:
    from spark_elastic.horovod.keras.optimizer import *
    from spark_elastic.horovod.keras.values import *
    from spark_elastic.horovod.ops.horovod_names import *
    from spark_elastic.horovod.ops.operations import allgather_object as allgather_object
    from spark_elastic.horovod.ops.operations import broadcast_object as broadcast_object
    from spark_elastic.keras import callbacks as callbacks
    from spark_elastic.keras import elastic as elastic


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name.startswith("__") and name != "__all__":  # `inspect` looks them up in every module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = name in _EXPORTS
    globals()[name] = getattr(importlib.import_module(_EXPORTS[name]), name) if own else _import_shared(name)
    return globals()[name]


def _import_shared(name: str) -> Any:
    try:
        shared = importlib.import_module(_SHARED)
    except ImportError as error:  # pickle looks names up in every module
        raise AttributeError(
            f"module {__name__!r} has {name!r} only where the engine can be imported, if at all: {error}"
        ) from error
    if name == "__all__":
        return [*_EXPORTS, *_MODULES, *shared.__all__]
    if name in shared.__all__:
        return getattr(shared, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    try:
        return sorted(_import_shared("__all__"))
    except AttributeError:
        return sorted([*_EXPORTS, *_MODULES])
