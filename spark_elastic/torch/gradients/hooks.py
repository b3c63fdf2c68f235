"""Hooks on gradients that do not keep their owner alive. The garbage collector cannot look into what autograd holds, so
an object that is referenced from there would never be freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize, ref

import torch


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls that method as long as its object lives; nothing from then on."""
    owner, function = ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: object) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *arguments)

    return call


def hook_gradients(
    parameters: Sequence[torch.nn.Parameter], arrived: Callable[[int], None]
) -> Callable[[], Any]:
    """From now on `arrived`, a method, is called with a parameter's number once a backward pass has added its gradient.

    Returns what ends that; so does the end of the method's object.
    """
    tell = weakly(arrived)
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda tensor, number=number: tell(number))  # type: ignore[no-untyped-call]
        for number, parameter in enumerate(parameters)
    ]
    end = finalize(arrived.__self__, lambda: [handle.remove() for handle in handles])  # type: ignore[attr-defined]
    end.atexit = False
    return end
