"""What torch.compile does not look into: sockets and threads are part of no graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """A compiled caller calls it, between two of its graphs. Decorating imports no compiler, which takes seconds."""
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    return cast(F, called)
