"""Functions that a compiled caller calls between two graphs: sockets and threads are nothing to compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def disable_compile(function: F) -> F:
    """As `torch.compiler.disable`, for code with sockets and threads: a compiled caller calls it between two graphs.

    The compiler is imported at the first call, since the import takes seconds.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call_disabled(*arguments: Any, **named: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    return cast("F", call_disabled)
