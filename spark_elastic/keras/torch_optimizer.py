"""`DistributedOptimizer` of Keras 3 on the torch backend: gradients are exchanged as one operation a dtype.

Training thread only. Imported where Keras runs on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduce_op import Average, ReduceOp, Sum
from spark_elastic.torch.allreduce import grouped_allreduce

Plain = TypeVar("Plain")


def DistributedOptimizer(
    optimizer: Plain,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Plain:
    """See `spark_elastic.keras.DistributedOptimizer`."""
    if isinstance(optimizer, _Distributed) or op not in (Average, Sum) or backward_passes_per_step < 1:
        raise InvalidInput(
            "on the torch backend DistributedOptimizer wraps a Keras optimizer once, takes op=Average or Sum, and "
            "backward_passes_per_step of 1 or more."
        )
    own = type(optimizer)
    kind = type(own.__name__, (_Distributed, own), {"__module__": own.__module__})
    distributed: Any = object.__new__(kind)
    object.__setattr__(distributed, "__dict__", optimizer.__dict__)  # past Keras's own way to set attributes
    factor = gradient_predivide_factor
    how = {"compression": compression, "op": op, "process_set": process_set}
    scale = {"prescale_factor": 1.0 / factor, "postscale_factor": factor} if op is Average else {}
    exchange = _Exchange(how | scale, backward_passes_per_step, average_aggregated_gradients)
    vars(distributed)["_spark_elastic"] = exchange
    wrapped: Plain = distributed
    return wrapped


class _Exchange:
    def __init__(self, how: dict[str, Any], passes: int, average: bool) -> None:
        self.local: set[int] = set()
        self._how = how
        self._passes = passes
        self._average = average
        self._taken = 0
        self._sums: list[torch.Tensor | None] = []

    def add(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """The sums of all passes once they are complete, else None."""
        if self._taken == 0:
            self._sums = [None if g is None else g.detach().clone() for g in gradients]
        else:
            self._sums = [
                a if b is None else (b.detach().clone() if a is None else a + b)
                for a, b in zip(self._sums, gradients, strict=True)
            ]
        self._taken += 1
        if self._taken < self._passes:
            return None
        self._taken = 0
        share = 1.0 / self._passes if self._average else 1.0
        return [None if g is None else g * share for g in self._sums]

    def shared(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        of_dtype: dict[torch.dtype, list[int]] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and id(variable) not in self.local:
                of_dtype.setdefault(gradient.dtype, []).append(i)
        for places in of_dtype.values():
            for i, result in zip(
                places, grouped_allreduce([gradients[i].detach() for i in places], **self._how), strict=True
            ):
                results[i] = result
        return results


class _Distributed:
    """What is added to the optimizer's own class."""

    _spark_elastic: _Exchange

    def register_local_var(self, var: Any) -> None:
        """The gradient of that variable is not exchanged."""
        self._spark_elastic.local.add(id(var))

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange, and apply.

        Raises:
            CollectiveError: the exchange broke; no variable was changed.
        """
        own: Any = super()
        this: Any = self
        variables = this._trainable_variables if trainable_variables is None else list(trainable_variables)
        summed = self._spark_elastic.add(list(grads))
        if summed is not None:
            own.apply(self._spark_elastic.shared(summed, variables), trainable_variables)
