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
from spark_elastic.torch.gradients.buckets import layout_hash
from spark_elastic.torch.gradients.rounds import (
    end_exchange,
    group_for,
    ranks_of_the_world,
    rounds_of_process,
)
from spark_elastic.torch.gradients.trainable import specs, trainable
from spark_elastic.torch.untraced import untraced
from spark_elastic.torch.wrapped import Wrapped
from spark_elastic.training.trailer import Verdict
from spark_elastic.worker.seat import engine_of_process


class Deltas:
    """What each step changed, combined over the ranks."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], process_set: ProcessSet) -> None:
        names, self._parameters, _ = trainable(named)
        self._layout = layout_hash(specs(names, self._parameters), ())
        self._process_set = process_set
        self._steps: tuple[Group | None, int] = (None, 0)  # in that group
        rounds_of_process().add(self)

    def close(self) -> None:
        """The optimizer is not in use any more."""
        rounds_of_process().discard(self)

    def steps(self) -> int:
        """See `Joinable`."""
        group = group_for(self._process_set)
        return self._steps[1] if group is not None and self._steps[0] is group else 0

    def run_without_data(self) -> bool:
        """See `Joinable`. Nothing added leaves the others' combined step as it is; here it is not applied."""
        group = group_for(self._process_set)
        if group is None or group.size == 1:
            return False
        with torch.no_grad(), ranks_of_the_world(group):
            for parameter in self._parameters:
                _combined(group, torch.zeros_like(parameter))
            return self._told(group, rows=0).rows > 0

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
            with torch.no_grad(), ranks_of_the_world(group):
                self._combine(group, before)
        except CollectiveError:
            with torch.no_grad():
                for parameter, was in zip(self._parameters, before, strict=True):
                    parameter.copy_(was)
            raise
        return value

    @untraced
    def _combine(self, group: Group, before: list[torch.Tensor]) -> None:
        engine = engine_of_process()
        if engine is not None:
            engine.drain()
        for parameter, was in zip(self._parameters, before, strict=True):
            change = _combined(group, parameter - was)
            parameter.copy_(was + change.to(was.device))
        self._told(group, rows=1)
        self._steps = group, 1 + (self._steps[1] if self._steps[0] is group else 0)

    def _told(self, group: Group, rows: int) -> Verdict:
        everything = np.ones(len(self._parameters), np.bool_)
        return end_exchange(group, self._layout, everything, ~everything, 0, rows)


def _combined(group: Group, change: torch.Tensor) -> torch.Tensor:
    host = change.cpu().contiguous()
    flat = host.view(torch.uint16) if host.dtype == torch.bfloat16 else host
    group.allreduce(flat.numpy(), op="adasum", dtype=str(host.dtype).removeprefix("torch."))
    return host


class ByDeltas(Wrapped):
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

    def close(self) -> None:
        """For processes that outlive their training: `join` goes by another optimizer's steps then."""
        self._deltas.close()
