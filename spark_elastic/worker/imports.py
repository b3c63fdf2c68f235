"""What a process imports before the user's program runs, and modules of this package that follow a framework's import.

Knows the modules by name only. Called in the main thread of a training process or a fork server, before the user's code
is loaded.

A program's early imports are a tuple of texts, in the program's order:

    torch               import torch
    torch:nn            from torch import nn
    NAME=value          os.environ["NAME"] = "value", for the imports that follow

A `?` behind the name says that the program gets along without the module, or keeps a value that is set already.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# Module of a framework -> the module that registers with it, or whose function `follow` takes it.
RANKS = "spark_elastic.integrations.ranks_of_others"
FOLLOWERS = {
    "torch": "spark_elastic.integrations.torch_distributed",
    "pyspark": "spark_elastic.clusters.spark",
    "accelerate.state": RANKS,
    "lightning.pytorch.strategies.parallel": RANKS,
    "pytorch_lightning.strategies.parallel": RANKS,
}
# Framework -> what it imports itself with its first optimizer, which takes seconds, with its first step, or to wrap
# a model: survivors of a loss would wait.
LATE_PARTS = {
    "torch": ("torch._dynamo", "torch.profiler._cupti_monitor?"),
    "accelerate": ("torch.distributed.algorithms.ddp_comm_hooks?",),
}
PACKAGE = __name__.partition(".")[0]
AS_HOROVOD = f"{PACKAGE}.as_horovod"  # in workers where it is in the process that starts the job
INSTALLED = {"site-packages", "dist-packages"}  # folders


class _FollowingFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in FOLLOWERS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_follow(module: ModuleType) -> None:
                execute(module)
                _follow(module, FOLLOWERS[name])

            spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec


def import_followers() -> None:
    """Import the follower of each framework that is imported, and let those of the others follow later."""
    for framework, follower in FOLLOWERS.items():
        if framework in sys.modules:
            _follow(sys.modules[framework], follower)
    if not any(isinstance(finder, _FollowingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FollowingFinder())


def _follow(module: ModuleType, follower: str) -> None:
    follow = getattr(importlib.import_module(follower), "follow", None)
    if follow is not None:
        follow(module)


def list_module_places() -> list[str]:
    """Where this process searches modules, without Spark's jar: it has none, and reading its names takes long."""
    return [place for place in sys.path if not os.path.basename(place).startswith("spark-core_")]


def list_early_imports(program: object, preload: Sequence[str]) -> tuple[str, ...]:
    """What a process imports before it runs this program; first what was asked for by name."""
    variables = [f"{name}={value}" for name, value in getattr(program, "environment", {}).items()]
    aliases = [f"{AS_HOROVOD}?"] if AS_HOROVOD in sys.modules else []
    return tuple(dict.fromkeys([*variables, *aliases, *preload, *getattr(program, "imports", ())]))


def find_packages(imports: Iterable[str]) -> tuple[str, ...]:
    """The packages that a program with these early imports cannot do without."""
    names = [text.replace(":", ".").split(".") for text in imports if "=" not in text and text[-1:] != "?"]
    # This package's `torch` needs torch.
    return tuple(dict.fromkeys((name[1:] or name)[0] if name[0] == PACKAGE else name[0] for name in names))


def import_early(
    imports: Sequence[str],
    environment: MutableMapping[str, str],
    is_done: Callable[[str, str], bool] = lambda *tried: False,
) -> None:
    """Import what a program imports, if it is installed. Failures are left to the program, and the environment is as
    before. is_done: called with each module and why it failed ("": it did not); True: import no more."""
    before = dict(environment)
    changed: list[str] = []
    try:
        for text in imports:
            if "=" in text:
                changed.append(_set_variable(text, environment))
            elif is_installed(text.rstrip("?")) and is_done(text, _try_import(text.rstrip("?"))):
                return
        for framework, parts in LATE_PARTS.items():
            for part in parts if framework in sys.modules else ():
                if is_done(part, _try_import(part.rstrip("?"))):
                    return
    finally:
        for name in changed:
            environment.pop(name, None)
            if name in before:
                environment[name] = before[name]


def _set_variable(text: str, environment: MutableMapping[str, str]) -> str:
    variable, _, value = text.partition("=")
    name = variable.removesuffix("?")
    if name == variable or name not in environment:
        environment[name] = value
    return name


def _try_import(text: str) -> str:
    module, _, name = text.partition(":")
    try:
        imported = importlib.import_module(module)
        if name and not hasattr(imported, name) and hasattr(imported, "__path__"):
            with suppress(ModuleNotFoundError):  # no module either: the program's own error says so
                importlib.import_module(f"{module}.{name}")
    except BaseException as error:  # whatever a module raises, `SystemExit` included
        return f"{type(error).__name__}: {error}"
    return ""


def is_installed(text: str) -> bool:
    """Whether a module is no file of the user: it came with Python or was installed. text: of an early import."""
    root = text.partition(":")[0].partition(".")[0]
    if root == PACKAGE or root in sys.stdlib_module_names:
        return True
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):  # a loaded module may have no spec
        return False
    return spec is not None and is_installed_spec(spec)


def is_installed_spec(spec: ModuleSpec) -> bool:
    places = [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]
    return any(not INSTALLED.isdisjoint(Path(place).parts) for place in places)
