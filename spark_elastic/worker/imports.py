"""Lets a module of this package follow the import of a framework, whichever code of the user imports that.

Knows the modules by name only. Called in the main thread of a training process, before the user's code is loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Module of a framework -> the module that registers with it, or whose function `follow` takes it.
RANKS = "spark_elastic.torch.ranks_of_others"
FOLLOWERS = {
    "torch": "spark_elastic.torch.distributed",
    "accelerate.state": RANKS,
    "lightning.pytorch.strategies.parallel": RANKS,
    "pytorch_lightning.strategies.parallel": RANKS,
}


class _FollowingLoader(Loader):
    """The loader of a framework, which imports the follower at the end."""

    def __init__(self, loader: Loader, follower: str) -> None:
        self._loader = loader
        self._follower = follower

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # what looks for the module's resources finds its own loader
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        _follow(module, self._follower)


class _FollowingFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in FOLLOWERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _FollowingLoader(spec.loader, FOLLOWERS[name])
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
