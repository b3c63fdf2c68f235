"""Models that FSDP2 divides under another library's trainer: `DividedModel`, and the state of such a training.

The trainer divides the model in each world anew, in place, so that everything that holds the model keeps it. No worker
has the whole of it by then: from the second world on it is divided without values, and the newest commit fills it.
Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable_state import _module_state_mapping

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.module_state import OptimizerStateHandler
from spark_elastic.handwritten.fsdp import FSDPState, reshard
from spark_elastic.integrations.trainer_adapter import OfTrainer

# What a module consists of beside its buffers: parameters, submodules, hooks.
_STRUCTURE = [
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict) and name != "_buffers"
]


class DividedModel:
    """A model as it was before a trainer divided it, and as each world divides it again."""

    def __init__(
        self,
        model: torch.nn.Module,
        list_optimizers: Callable[[], list[torch.optim.Optimizer]],
        lasting: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """list_optimizers: returns those of the present world, once the trainer has made it. lasting: optimizers that
        stay through all worlds."""
        self._model, self._list_optimizers = model, list_optimizers
        self._parts = []
        for part in model.modules():
            structure = {name: vars(part)[name].copy() for name in _STRUCTURE if name in vars(part)}
            self._parts.append((part, type(part), {*vars(part)}, structure))
        self._has_values = True  # the parts still hold the parameters as the program has made them
        # By number, as wrappers change names.
        numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        self._trained = []
        for optimizer in lasting:
            groups = [[numbers.get(id(p), -1) for p in group["params"]] for group in optimizer.param_groups]
            self._trained.append((optimizer, groups))
        if any(-1 in own for _, groups in self._trained for own in groups):
            raise InvalidInput(
                "the optimizer trains a parameter that belongs to no part of the model, so it could not be divided: "
                "make it an attribute of one of the model's modules."
            )

    def make_state(self, **values: Any) -> DividedTrainerState:
        return DividedTrainerState(self._build, **values)

    def restore(self, *, with_values: bool) -> None:
        """Take back whatever a former world has made of the model. with_values: nothing was committed yet, so training
        begins with those of the program."""
        if not with_values:
            self.drop_values()
        elif not self._has_values:
            raise InvalidInput(
                "a worker and the one that held the copy of its part of the model were lost before the first step, and "
                "the initial weights with them: start the job again, and spread the workers over more hosts."
            )
        for part, kind, names, structure in self._parts:
            if type(part) is not kind:
                part.__class__ = kind
                for name in vars(part).keys() - names:
                    del vars(part)[name]
            _module_state_mapping.pop(part, None)  # torch has no public name for what it has divided
            for name, own in structure.items():
                vars(part)[name].clear()
                vars(part)[name].update(own)
        self._follow_parameters()

    def drop_values(self) -> None:
        """Let go of the parameters as the program has made them; others of the same shapes take no memory."""
        if not self._has_values:
            return
        self._has_values, stands_for = False, {}
        for *_, structure in self._parts:
            for name, parameter in structure["_parameters"].items():
                if parameter is None:
                    continue
                if id(parameter) not in stands_for:
                    empty = torch.empty_like(parameter, device="meta")
                    stands_for[id(parameter)] = parameter, torch.nn.Parameter(empty, parameter.requires_grad)
                structure["_parameters"][name] = stands_for[id(parameter)][1]

    def share_values(self) -> None:
        """Have all ranks begin with those of rank 0. Collective."""
        for parameter in self._model.parameters():
            dist.broadcast(parameter.detach(), 0)

    def fill(self, device: torch.device) -> None:
        """Give memory to what was divided without values, and to the optimizers what they train."""
        if any(parameter.is_meta for parameter in self._model.parameters()):
            self._model.to_empty(device=device)
            self._follow_parameters()

    def reshard(self) -> None:
        """Undo what a validation has left: whole parameters, which a callback cannot compare to divided ones."""
        reshard(self._model)

    def _follow_parameters(self) -> None:
        parameters = list(self._model.parameters())
        for optimizer, groups in self._trained:
            optimizer.state.clear()
            del optimizer.param_groups[len(groups) :]  # a commit brings back those that training has added
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [parameters[number] for number in own]

    def _build(self, _: Any) -> dict[str, Any]:
        optimizers = {f"optimizer_{number}": each for number, each in enumerate(self._list_optimizers())}
        return {"model": self._model, **optimizers}


class DividedTrainerState(OfTrainer, FSDPState):
    """The state of a training whose model is divided: its adapter, and what all worlds keep."""

    builds_late = True

    def _build_values(self) -> None:
        super()._build_values()
        for handler in self._find_handlers(OptimizerStateHandler).values():
            handler.list_parameters = self._handlers["model"].value.named_parameters
