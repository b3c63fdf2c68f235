"""What the torch objects of a training are, as digests that are the same in every process (R19).

The weights that a model begins with are none of it: they are another draw in each process that sets no seed, and such
a run must go on, too. Looks only, at copies where something has to be made. Any thread.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch

from spark_elastic.torch.callbacks import BestWeights, EarlyStopping, LearningRateSchedule
from spark_elastic.torch.optimizers import made
from spark_elastic.torch.train.loss import module_of
from spark_elastic.training.identity import PLAIN, digest, text


def of_module(module: torch.nn.Module) -> str:
    """Classes, settings and tensors' shapes; no weights."""
    parts = [(name, type(part).__name__, *sorted(_settings(part))) for name, part in module.named_modules()]
    tensors = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in _tensors(module)]
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return digest([parts, tensors, trained])


def of_loss(loss: Any) -> str:
    """A loss's tensors, class weights for example, are part of it."""
    loss = module_of(loss)
    if not isinstance(loss, torch.nn.Module):
        return digest(loss)
    return digest([of_module(loss), weights(loss)])


def of_optimizer(model: torch.nn.Module, given: Any) -> str:
    """Its class and the settings of its groups. given: as `Brought.optimizer`."""
    ready = isinstance(given, torch.optim.Optimizer)
    optimizer = given if ready else made(copy.deepcopy(model), given, None)[0]
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return digest([type(optimizer).__name__, groups])


def of_callbacks(callbacks: tuple[Any, ...]) -> str:
    """Of those that end a training or choose its weights; what a user's own does cannot be known."""
    found = [each for each in callbacks if isinstance(each, EarlyStopping | BestWeights)]
    return digest([(type(each).__name__, *sorted(_settings(each))) for each in found])


def of_schedules(model: torch.nn.Module, given: Any, callbacks: tuple[Any, ...]) -> str:
    """Of learning rates: the user's functions that make them, and the schedulers that a LightningModule makes."""
    found = [text(each.binding) for each in callbacks if isinstance(each, LearningRateSchedule)]
    if given is None:
        optimizer, schedules = made(copy.deepcopy(model), None, None)
        for each in schedules:
            assert isinstance(each, LearningRateSchedule)
            found.append(text([each.binding[1:], _of_scheduler(each.binding[0](optimizer))]))
    return digest(found)


def _of_scheduler(scheduler: Any) -> list[Any]:
    """Its class, settings and functions, and of those that it is made of."""
    settings = {
        name: held for name, held in vars(scheduler).items() if name != "optimizer" and name[0] != "_"
    }
    return [type(scheduler).__name__, settings, *map(_of_scheduler, getattr(scheduler, "_schedulers", ()))]


def weights(module: torch.nn.Module) -> str:
    """16 hex digits of every number of the state."""
    found = hashlib.sha256()
    for name, tensor in _tensors(module):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, held) for name, held in module.state_dict().items() if isinstance(held, torch.Tensor)]


def _settings(thing: Any) -> list[tuple[str, str]]:
    """Numbers for all (a user's strings may be a folder's or a day's name), strings for torch's own modules."""
    own = type(thing).__module__.startswith(("torch.nn", "spark_elastic."))
    return [
        (name, text(value))
        for name, value in vars(thing).items()
        if not name.startswith("_") and name != "training" and _tells(value, own)
    ]


def _tells(value: Any, strings: bool) -> bool:
    if isinstance(value, list | tuple):
        return all(_tells(each, strings) for each in value)
    return isinstance(value, PLAIN if strings else (bool, int, float))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
