"""Adasum for hand-written loops: every rank takes a step of its own, and the steps are combined.

The training thread owns everything here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.buckets import hash_layout
from spark_elastic.gradients.compiled_callers import disable_compile
from spark_elastic.gradients.host_memory import array_of, get_dtype_name
from spark_elastic.gradients.layout import build_specs, find_trainable
from spark_elastic.gradients.process_sets import ProcessSet
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.horovod.torch.gradient_sync import (
    OptimizerSync,
    exchange_summary,
    get_training_group,
    translate_ranks_in_errors,
)
from spark_elastic.worker.session import get_collective_thread


class AdasumSync(OptimizerSync):
    """Combines the steps of all ranks.

    Each parameter's change is combined with those of the other ranks by the angle between them (Maleki et al., "Scaling
    distributed training with adaptive summation", MLSys 2021). The optimizer's state is each rank's own.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], process_set: ProcessSet) -> None:
        trainable = find_trainable(named)
        self._parameters = list(trainable.values())
        self._frozen = [(name, parameter) for name, parameter in named if name not in trainable]
        self._layout = hash_layout(build_specs(list(trainable), self._parameters), ())
        super().__init__(process_set)

    def _exchange_nothing(self, group: Group) -> StepDecision:
        """Zeros leave the combined step of the others as it is; this rank does not apply it."""
        with torch.no_grad():
            for parameter in self._parameters:
                _allreduce_adasum(group, torch.zeros_like(parameter))
            return self._exchange_summary(group, rows=0)

    def combine_step(self, apply: Callable[[], Any]) -> Any:
        """Call `apply`, which changes the parameters, and replace the change by that of all ranks.

        Raises:
            CollectiveError: the exchange broke; the parameters are as before, the optimizer's state is one step ahead.
            InvalidInput: a parameter was frozen when training began, and is not now; nothing has changed.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InvalidInput(
                    f"parameter {name!r} was frozen when training began, and op=Adasum combines the others only: let "
                    "it require a gradient from the start."
                )
        group = get_training_group(self._process_set)
        before = [parameter.detach().clone() for parameter in self._parameters]
        value = apply()
        if group is None:
            return value
        try:
            with torch.no_grad(), translate_ranks_in_errors(group):
                self._combine(group, before)
        except CollectiveError:
            with torch.no_grad():
                for parameter, was in zip(self._parameters, before, strict=True):
                    parameter.copy_(was)
            raise
        return value

    @disable_compile
    def _combine(self, group: Group, before: list[torch.Tensor]) -> None:
        thread = get_collective_thread()
        if thread is not None:
            thread.drain()
        for parameter, was in zip(self._parameters, before, strict=True):
            change = _allreduce_adasum(group, parameter - was)
            parameter.copy_(was + change.to(was.device))
        self._exchange_summary(group, rows=1)
        self.count_step(group)

    def _exchange_summary(self, group: Group, rows: int) -> StepDecision:
        everything = np.ones(len(self._parameters), np.bool_)
        return exchange_summary(group, self._layout, everything, ~everything, rows)


def _allreduce_adasum(group: Group, change: torch.Tensor) -> torch.Tensor:
    host = change.cpu().contiguous()
    group.allreduce(array_of(host), op="adasum", dtype=get_dtype_name(host.dtype))
    return host
