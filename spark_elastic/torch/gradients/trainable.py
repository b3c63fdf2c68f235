"""Which parameters take part in exchanges, and their description for the layout. Looks only; no thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.torch.gradients.buckets import Spec

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def trainable(
    named: Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[list[str], list[torch.nn.Parameter], list[tuple[str, torch.nn.Parameter]]]:
    """(names, parameters, frozen ones)

    Raises:
        InvalidInput: there is none, or one cannot be exchanged.
    """
    names, parameters, frozen = [], [], []
    for name, parameter in named:
        if not parameter.requires_grad:
            frozen.append((name, parameter))
            continue
        if parameter.device.type not in ("cpu", "cuda"):
            raise InvalidInput(
                f"parameter {name!r} is on {parameter.device}: only CPU and CUDA parameters can be trained."
            )
        if parameter.dtype not in DTYPES:
            raise InvalidInput(
                f"parameter {name!r} is {parameter.dtype}: only float16, bfloat16, float32 and float64 can be trained."
            )
        names.append(name)
        parameters.append(parameter)
    if not parameters:
        raise InvalidInput("the model has no parameter that requires a gradient: there is nothing to train.")
    return names, parameters, frozen


def specs(names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> list[Spec]:
    return [
        Spec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.element_size(), str(p.device))
        for name, p in zip(names, parameters, strict=True)
    ]
