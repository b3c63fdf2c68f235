"""Whether a module can be taken to the workers and saved: it is copied and pickled on the way. Looks only."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from spark_elastic.errors import InvalidInput


def check_travels(model: torch.nn.Module) -> None:
    """Raises InvalidInput with the first layer that torch can neither copy nor pickle, and what to do instead."""
    for name, part in model.named_modules():
        layer = f"layer {name!r} of the model" if name else "the model"
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
        computed = [
            key for key, held in vars(part).items() if isinstance(held, torch.Tensor) and not held.is_leaf
        ]
        if computed:
            raise InvalidInput(
                f"{layer} holds {computed[0]}, a tensor computed from parameters (as weight_norm's hook does), which "
                "cannot be copied for the workers: compute it in forward."
            )
