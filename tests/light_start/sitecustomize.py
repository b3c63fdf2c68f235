"""On PYTHONPATH, this keeps a Python process from importing what its libraries have no use for yet, or at all.

torch imports its compiler with the first optimizer of a process, to mark functions that it should leave alone: half of
what the start of a worker computes. With the first backward pass from a given gradient it imports sympy, to compare
shapes. Both come once something else is asked of them. Other libraries import what they find installed: Keras for its
wrappers and plots, a quarter of its start; httpx for its command.

What imports make stays to the end. Python's collector looks through it again and again while they are made, and once
more when the process ends: a third of what a process with torch computes.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import operator
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

COMPILER, SHAPES = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
# Module -> the library that gets along without it.
OPTIONAL = {"matplotlib": "keras", "sklearn": "keras", "pygments": "httpx", "rich": "httpx"}


class Unused(ModuleType):
    """Stands in `sys.modules` for a module, which is loaded once something is asked that is not here."""

    def __getattr__(self, name: str) -> Any:
        if self.__name__ not in sys.modules or name.startswith("__"):
            raise AttributeError(name)  # what an import looks at
        return getattr(load(self.__name__), name)


def load(name: str) -> ModuleType:
    """The module itself, which takes the place of what stands for it."""
    if FINDER.unused.pop(name, None):
        sys.modules.pop(name, None)
    return importlib.import_module(name)


def mark(function: Any) -> Any:
    """Hand back what only the compiler would treat otherwise."""
    return function


class UnusedCompiler(Unused):
    """It has nothing to leave alone as long as it is not loaded."""

    allow_in_graph = assume_constant_result = staticmethod(mark)
    OptimizedModule = type("OptimizedModule", (), {})  # which nothing of this process is

    @staticmethod
    def disable(marked: Any = None, *how: Any, **named: Any) -> Any:
        if marked is None:
            return mark
        return marked if isinstance(marked, FunctionType) else load(COMPILER).disable(marked, *how, **named)

    @staticmethod
    def graph_break(*_: object) -> None:
        """Outside of what is compiled it does nothing."""


class UnusedShapes(Unused):
    """Without the compiler, shapes are numbers."""

    sym_eq = staticmethod(operator.eq)
    expect_true = staticmethod(bool)


class LightFinder(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self.unused: dict[str, type[Unused]] = {COMPILER: UnusedCompiler, SHAPES: UnusedShapes}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in OPTIONAL and is_importing(OPTIONAL[name]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name.startswith(f"{COMPILER}.") and COMPILER in self.unused:
            load(COMPILER)
            importlib.import_module(name)
        elif name not in self.unused:
            return None
        return ModuleSpec(name, self, is_package=name == COMPILER)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.unused[spec.name](spec.name) if spec.name in self.unused else sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def is_importing(name: str) -> bool:
    """Whether that module is being imported, and is not complete."""
    return name in sys.modules and getattr(sys.modules[name].__spec__, "_initializing", False)


FINDER = LightFinder()
sys.meta_path.insert(0, FINDER)
gc.set_threshold(20_000)
atexit.register(gc.freeze)
