"""Where torch calls us: hooks that say when a backward pass has added a gradient, which run in autograd's thread of its
device, and functions that a compiled caller calls between two graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import finalize, ref

import torch


def make_weak_method(method: Callable[..., None], *arguments: object) -> Callable[..., None]:
    """Return a function that calls a method with these arguments while its object lives, and does nothing afterwards.
    The garbage collector cannot look into what autograd holds: an object that is referenced there is never freed."""
    owner, function = ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*_: object) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *arguments)

    return call


def hook_gradients(
    parameters: Sequence[torch.nn.Parameter], on_gradient: Callable[[int], None]
) -> Callable[[], Any]:
    """Call `on_gradient`, a method, with the number of a parameter whenever a backward pass has added its gradient.
    Returns a function that removes the hooks; they are also removed when the object of the method is freed."""
    handles = []
    for number, parameter in enumerate(parameters):
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # torch hooks no other; the hook stays while the parameter is frozen
        hook = make_weak_method(on_gradient, number)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(is_trained)
    remove = finalize(on_gradient.__self__, lambda: [handle.remove() for handle in handles])  # type: ignore[attr-defined]
    remove.atexit = False
    return remove


F = TypeVar("F", bound=Callable[..., Any])


def disable_compile(function: F) -> F:
    """As `torch.compiler.disable`, for code with sockets and threads: a compiled caller calls it between two graphs.
    The compiler is imported at the first call, since the import takes seconds."""
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call_disabled(*arguments: Any, **named: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    return cast("F", call_disabled)
