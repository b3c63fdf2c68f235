"""Whether a module can be taken to the workers and saved: it is copied and pickled on the way. Looks only."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from spark_elastic.errors import InvalidInput


def check_travels(model: torch.nn.Module) -> None:
    """Raises InvalidInput with the first layer that cannot be copied and pickled, and what to do instead."""
    for name, part in model.named_modules():
        layer = _called(name)
        if isinstance(part, torch.jit.ScriptModule):
            raise InvalidInput(f"{layer} is a ScriptModule: pass the module that it was made from.")
        if is_parametrized(part):
            names = ", ".join(part.parametrizations)
            raise InvalidInput(
                f"{layer} has parametrizations (of {names}; weight_norm, spectral_norm and the like), which cannot be "
                "pickled for the workers: compute that tensor in forward, or remove_parametrizations() before the fit."
            )
        if any(is_lazy(each) for each in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            raise InvalidInput(
                f"{layer} is lazy and has no weights yet: call the model on one row first, or give its sizes."
            )
        hooked = [name for name, each in part.named_parameters(recurse=False) if _has_hooks(each)]
        if hooked:
            raise InvalidInput(
                f"{layer} has a hook on the gradient of {hooked[0]}, which torch leaves out of the workers' copy: "
                "register it in a callback's on_fit_begin (training.model)."
            )
        computed = [
            key for key, held in vars(part).items() if isinstance(held, torch.Tensor) and not held.is_leaf
        ]
        if computed:
            raise InvalidInput(
                f"{layer} holds {computed[0]}, a tensor computed from parameters (as weight_norm's hook does), which "
                "cannot be copied for the workers: compute it in forward."
            )
    _check_held(model)


def _check_held(model: torch.nn.Module) -> None:
    """What torch knows nothing of: locks, open files, clients, generators."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    if (failed := _failure(model, tensors)) is None:
        return
    parts = reversed(list(model.named_modules()))  # a layer after its parts, so that the innermost is found
    name, part = next(each for each in parts if _failure(each[1], tensors) is not None)
    keys = [key for key, held in vars(part).items() if _failure(held, tensors) is not None]
    holds = f"{_called(name)} holds {keys[0]!r}, which" if keys else _called(name)
    raise InvalidInput(
        f"{holds} cannot be copied or pickled for the workers ({failed}): make it in forward, when it is first used."
    ) from failed


def _called(name: str) -> str:
    return f"layer {name!r} of the model" if name else "the model"


def _failure(thing: Any, tensors: Mapping[int, torch.Tensor]) -> Exception | None:
    """What its copying or pickling raises. Tensors stay where they are: both can be done to them, and cost memory."""
    try:
        copy.deepcopy(thing, dict(tensors))
        _WithoutTensors(io.BytesIO()).dump(thing)
    except Exception as error:  # objects raise anything when they are asked for their state
        return error
    return None


class _WithoutTensors(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    def persistent_id(self, thing: Any) -> str | None:
        return "tensor" if isinstance(thing, torch.Tensor) else None


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
