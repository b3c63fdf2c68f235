"""`import spark_elastic.as_horovod` first, and what imports `horovod` afterwards gets this package's parts.

For libraries whose imports cannot be changed. The modules are made when they are imported, and have the names of the
modules here that stand behind them; workers of jobs that this process starts have them, too. Any thread.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from spark_elastic.errors import InvalidInput

VERSION = "0.28.1"  # Horovod's last release, whose interface this is
_TORCH, _TENSORFLOW, _KERAS = "spark_elastic.torch", "spark_elastic.tensorflow", "spark_elastic.keras"
# A module of ours -> Horovod's modules, without "horovod.", that it stands for. None: they have modules alone.
_TARGETS: dict[str | None, tuple[str, ...]] = {
    None: ("", "common", "spark.common"),
    "spark_elastic.horovod.ops.horovod_names": ("common.exceptions",),
    _TORCH: ("torch", "torch.functions", "torch.mpi_ops"),
    f"{_TORCH}.compression": ("torch.compression",),
    f"{_TORCH}.elastic": ("torch.elastic", "torch.elastic.sampler", "torch.elastic.state"),
    _TENSORFLOW: ("tensorflow",),
    f"{_TENSORFLOW}.compression": ("tensorflow.compression",),
    f"{_TENSORFLOW}.elastic": ("tensorflow.elastic",),
    _KERAS: ("keras", "tensorflow.keras"),
    f"{_KERAS}.callbacks": ("keras.callbacks", "tensorflow.keras.callbacks"),
    f"{_KERAS}.elastic": ("keras.elastic", "tensorflow.keras.elastic"),
    "spark_elastic.estimators.horovod_names": (
        *("spark", "spark.common.backend", "spark.common.store", "spark.keras", "spark.keras.estimator"),
        *("spark.lightning", "spark.lightning.estimator", "spark.torch", "spark.torch.estimator"),
    ),
}
_MODULES = {name: target for target, names in _TARGETS.items() for name in names}


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
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
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


if "horovod" in sys.modules:
    raise InvalidInput(
        "horovod itself is imported already: write `import spark_elastic.as_horovod` before what imports horovod."
    )
sys.meta_path.insert(0, _Finder())
