"""Alone: gradients stay where autograd puts them. The other modes add buckets to it.

The training thread owns a mode; during backward the hooks do, one at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.bucket_memory import Views
from spark_elastic.gradients.layout import GradientLayout
from spark_elastic.gradients.step_reducer import coalesce_rows
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread

Flags = npt.NDArray[np.bool_]


class LocalMode:
    """Takes the gradients of one step after another, in one layout and one group: `begin`, `on_gradient` for each
    gradient of each backward pass, `finish` or `abandon`. Here for a process that trains alone."""

    unit = "step"  # what has so many backward passes, in words
    in_share = False  # a virtual share was begun and not completed
    follows_backward = True  # it is to be told of each gradient when a backward pass has added it

    def __init__(self, layout: GradientLayout) -> None:
        self.layout = layout
        self.views: Views = [None] * len(layout.parameters)  # where gradients are moved; None: they stay
        self.has_open_step = False  # a step was begun, and neither finished nor abandoned: gradients count
        # Parameters that got a gradient in this step
        self.present: Flags = np.zeros(len(layout.parameters), np.bool_)
        self.found_sparse: Flags = self.present.copy()  # parameters that got a sparse one
        self.bulk_seconds: float | None = None  # until the bulk plane was in use; None: it is not, or not yet
        self._launched = 0  # buckets that were launched in this step
        self._passes = 0  # backward passes until `finish`
        self._arrivals: list[int] = []  # by parameter: passes that have added a gradient

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        """Begin a step of that many backward passes. thread: runs its collectives."""
        count = len(self.layout.parameters)
        self._passes, self._arrivals = passes, [0] * count
        self.present, self.found_sparse = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self.has_open_step, self._launched = True, 0

    def on_gradient(self, index: int) -> None:
        """Take a gradient that a backward pass has added. Called in the hook."""
        self._count(index)
        self._place_gradient(index)

    def finish(self) -> None:
        """Bring all gradients to their sums. Raises what `GradientExchange.finish` does."""
        self._place_absent()
        self.has_open_step = False

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient of the newest step is still there."""
        return any(self.layout.parameters[i].grad is not None for i in self.present.nonzero()[0].tolist())

    @property
    def has_launched_buckets(self) -> bool:
        """Whether a step is open of which some buckets were launched: the peers wait for the rest."""
        return self.has_open_step and self._launched > 0

    def abandon(self) -> None:
        """Give up the open step, if any; nothing of it is in progress when this returns."""
        self.has_open_step = self.in_share = False

    def hand_over(self, views: Views) -> None:
        """Move the gradients that lie in this mode's memory to the views of another one, or to memory of their own."""
        for parameter, own, view in zip(self.layout.parameters, self.views, views, strict=True):
            if own is not None and parameter.grad is own:
                parameter.grad = own.clone() if view is None else view.copy_(own)

    def _count(self, index: int) -> None:
        if self._arrivals[index] == self._passes:
            raise InvalidInput(
                f"the gradient of parameter {self.layout.names[index]!r} came more than {self._passes} times in one "
                f"{self.unit}: call step() after that many backward passes, and use checkpointing with "
                "use_reentrant=False."
            )
        self._arrivals[index] += 1
        self.present[index] = True

    def _place_gradient(self, index: int) -> None:
        """Make the parameter's gradient, wherever autograd or the user put it, its view."""
        parameter, view = self.layout.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = self._prepare_sparse(index, gradient, keeps_rows=view is None)
        if view is None:
            parameter.grad = gradient
        elif gradient is not view:
            if gradient is None:
                view.zero_()
            else:
                # A copy takes three passes over the memory; if backward added to zeros in the bucket, it would
                # take five.
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            parameter.grad = view

    def _place_absent(self) -> None:
        """Place what no backward pass has brought: zeros, or what was there before the step."""
        for index in (~self.present).nonzero()[0].tolist():
            self._place_gradient(index)

    def _prepare_sparse(self, index: int, gradient: torch.Tensor, *, keeps_rows: bool) -> torch.Tensor:
        """Return what to exchange for a sparse gradient: itself with each row listed once, or its dense form."""
        sparse, name = self.layout.options.sparse, self.layout.names[index]
        if sparse == "refused":
            raise InvalidInput(f"parameter {name!r} has a sparse gradient: use sparse=False.")
        if sparse == "sparse":
            self.found_sparse[index] = True
            gradient = coalesce_rows(name, gradient)
            if keeps_rows:
                return gradient
        return gradient.detach().to_dense()
