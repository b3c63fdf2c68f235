"""`DistributedOptimizer` with op=Adasum: every rank takes a step of its own, and the steps are combined.

Each parameter's change is combined with the other ranks' by the angle between them (Maleki et al., "Scaling distributed
training with adaptive summation", MLSys 2021). The optimizer's state is each rank's own. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet
from spark_elastic.torch.buckets import layout_hash
from spark_elastic.torch.rounds import end_exchange, group_for
from spark_elastic.torch.trainable import specs, trainable
from spark_elastic.worker.seat import engine_of_process


class Deltas:
    """What each step changed, combined over the ranks."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], process_set: ProcessSet) -> None:
        names, self._parameters, _ = trainable(named)
        self._layout = layout_hash(specs(names, self._parameters), ())
        self._process_set = process_set

    def around(self, apply: Callable[[], Any]) -> Any:
        """`apply` changes the parameters; then they hold what they were plus the combined change.

        Raises:
            CollectiveError: the exchange broke; parameters are as they were, the optimizer's state is a step ahead.
        """
        group = group_for(self._process_set)
        before = [parameter.detach().clone() for parameter in self._parameters]
        value = apply()
        if group is None:
            return value
        try:
            with torch.no_grad():
                self._combine(group, before)
        except CollectiveError:
            with torch.no_grad():
                for parameter, was in zip(self._parameters, before, strict=True):
                    parameter.copy_(was)
            raise
        return value

    def _combine(self, group: Group, before: list[torch.Tensor]) -> None:
        engine = engine_of_process()
        if engine is not None:
            engine.drain()
        for parameter, was in zip(self._parameters, before, strict=True):
            change = (parameter - was).cpu().contiguous()
            flat = change.view(torch.uint16) if change.dtype == torch.bfloat16 else change
            group.allreduce(flat.numpy(), op="adasum", dtype=str(change.dtype).removeprefix("torch."))
            parameter.copy_(was + change.to(was.device))
        everything = np.ones(len(before), np.bool_)
        end_exchange(group, self._layout, everything, ~everything, 0)


class ByDeltas(torch.optim.Optimizer):
    """What is added to the optimizer's own class. Never instantiated by itself."""

    _deltas: Deltas

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients and combine with the other ranks' steps. closure: computes gradients.

        Raises:
            CollectiveError: see `Deltas.around`; a state that was committed before puts the optimizer back, too.
        """
        self._opt_called = True  # what a scheduler made before the wrapping looks for
        plain = super().step
        return self._deltas.around(plain if closure is None else lambda: plain(closure))

    step.hooked = True  # type: ignore[attr-defined] # torch then leaves the profiling hooks to the own class's step

    def synchronize(self) -> None:
        """Nothing: gradients are each rank's own."""

    def skip_synchronize(self) -> None:
        raise InvalidInput(
            "skip_synchronize() has no meaning with op=Adasum, which exchanges in step() alone."
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: gradients add up until `step`."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise InvalidInput("DistributedOptimizer takes no further parameters: add the group before wrapping.")

    def close(self) -> None:
        """Nothing is held."""
