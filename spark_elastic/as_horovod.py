"""`import spark_elastic.as_horovod` first, and what imports `horovod` afterwards gets this package's parts.

For libraries whose imports cannot be changed. The modules are made when they are imported, and have the names of the
modules here that stand behind them; workers of jobs that this process starts have them, too. Any thread.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from spark_elastic.errors import InvalidInput

VERSION = "0.28.1"  # Horovod's last release, whose interface this is
_ESTIMATORS = "spark_elastic.estimators.horovod_names"
_SHARED = "spark_elastic.horovod.ops.horovod_names"
_TORCH, _TENSORFLOW, _KERAS = "spark_elastic.torch", "spark_elastic.tensorflow", "spark_elastic.keras"
# Horovod's module, without "horovod." -> ours; None: it has modules alone.
_MODULES = {
    "": None,
    "common": None,
    "common.exceptions": _SHARED,
    "torch": _TORCH,
    "torch.compression": f"{_TORCH}.compression",
    "torch.elastic": f"{_TORCH}.elastic",
    "torch.elastic.sampler": f"{_TORCH}.elastic",
    "torch.elastic.state": f"{_TORCH}.elastic",
    "torch.functions": _TORCH,
    "torch.mpi_ops": _TORCH,
    "tensorflow": _TENSORFLOW,
    "tensorflow.compression": f"{_TENSORFLOW}.compression",
    "tensorflow.elastic": f"{_TENSORFLOW}.elastic",
    "tensorflow.keras": _KERAS,
    "tensorflow.keras.callbacks": f"{_KERAS}.callbacks",
    "tensorflow.keras.elastic": f"{_KERAS}.elastic",
    "keras": _KERAS,
    "keras.callbacks": f"{_KERAS}.callbacks",
    "keras.elastic": f"{_KERAS}.elastic",
    "spark": _ESTIMATORS,
    "spark.common": None,
    "spark.common.backend": _ESTIMATORS,
    "spark.common.store": _ESTIMATORS,
    "spark.keras": _ESTIMATORS,
    "spark.keras.estimator": _ESTIMATORS,
    "spark.lightning": _ESTIMATORS,
    "spark.lightning.estimator": _ESTIMATORS,
    "spark.torch": _ESTIMATORS,
    "spark.torch.estimator": _ESTIMATORS,
}


def find_target(name: str) -> str | None:
    """The module of ours that stands behind one of Horovod's; None: there is none."""
    return _MODULES.get(name.partition(".")[2])


class _Alias(ModuleType):
    """A module of Horovod's, in which one of ours is looked up."""

    def __init__(self, name: str, target: str | None) -> None:
        super().__init__(name, f"Stands for {target or 'a package of Horovod'}.")
        self.__path__: list[str] = []
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if self._target is not None and not name.startswith("__"):
            return getattr(importlib.import_module(self._target), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [] if self._target is None else dir(importlib.import_module(self._target))

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = name.partition(".")
        return ModuleSpec(name, self, is_package=True) if root == "horovod" and rest in _MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        target = find_target(spec.name)
        if target is not None:
            importlib.import_module(target)  # a framework that is not installed is an ImportError here
        return _Alias(spec.name, target)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "horovod":
            module.__version__ = VERSION  # type: ignore[attr-defined]


def _install() -> None:
    if "horovod" in sys.modules:
        raise InvalidInput(
            "horovod itself is imported already: write `import spark_elastic.as_horovod` before what imports horovod."
        )
    sys.meta_path.insert(0, _Finder())


_install()
