"""On PYTHONPATH, this makes a folder of this machine like a mount of an object store: no links, renames or appends.

For every Python process below: the folder is what MOUNT_OF_OBJECTS names.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable
from typing import Any

FOLDER = os.environ.get("MOUNT_OF_OBJECTS")


def refuse_below(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """place: the argument that is a path."""

    def refuse(*arguments: Any, **named: Any) -> Any:
        if is_inside(arguments[place]):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported", arguments[place])
        return function(*arguments, **named)

    return refuse


def is_inside(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and os.path.abspath(os.fspath(path)).startswith(str(FOLDER))


def refuse_appends(function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if is_inside(file) and set(mode) & {"a", "+"}:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported", file)
        return function(file, mode, *arguments, **named)

    return refuse


if FOLDER:
    for name in ("link", "rename", "replace"):
        setattr(os, name, refuse_below(getattr(os, name), 1))
    builtins.open = refuse_appends(builtins.open)
