"""On PYTHONPATH, this keeps a Python process from importing torch's compiler before it compiles something.

torch imports it with the first optimizer of a process, to mark functions that it should leave alone, which takes as
long as torch itself: half of what a worker of a small job computes. For every Python process below; whatever else is
asked of the compiler loads it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class UnusedCompiler(ModuleType):
    """Stands in `sys.modules` for the compiler, which has nothing to leave alone as long as it is not loaded."""

    def __getattr__(self, name: str) -> Any:
        if COMPILER not in sys.modules or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)  # what an import looks at
        return getattr(load_compiler(), name)

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break(*_: object) -> None:
        """Outside of what is compiled it does nothing."""


def load_compiler() -> ModuleType:
    """The compiler itself, which takes the place of `UnusedCompiler`."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        sys.modules.pop(COMPILER)
    return importlib.import_module(COMPILER)


class CompilerFinder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == COMPILER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return UnusedCompiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


FINDER = CompilerFinder()
sys.meta_path.insert(0, FINDER)
