"""`DistributedOptimizer` of Keras 3 on the torch backend: gradients are exchanged as one operation a dtype.

Training thread only. Imported where Keras runs on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.compression import checked_compression
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduce_op import Average, ReduceOp, Sum
from spark_elastic.ops.world import world
from spark_elastic.torch.allreduce import grouped_allreduce

Plain = TypeVar("Plain")


def DistributedOptimizer(  # noqa: PLR0913 - name and arguments are Horovod's
    optimizer: Plain,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Plain:
    """See `spark_elastic.keras.DistributedOptimizer`."""
    if isinstance(optimizer, _Distributed) or op not in (Average, Sum) or backward_passes_per_step < 1:
        raise InvalidInput(
            "on the torch backend DistributedOptimizer wraps a Keras optimizer once, takes op=Average or Sum, and "
            "backward_passes_per_step of 1 or more."
        )
    if gradient_predivide_factor <= 0 or (op is Sum and gradient_predivide_factor != 1.0):
        raise InvalidInput("gradient_predivide_factor must be above 0, and left out with op=Sum.")
    own = type(optimizer)
    kind = type(own.__name__, (_Distributed, own), {"__module__": own.__module__})
    distributed: Any = object.__new__(kind)
    object.__setattr__(distributed, "__dict__", optimizer.__dict__)  # past Keras's own way to set attributes
    factor = gradient_predivide_factor
    how = {
        "compression": checked_compression(compression),
        "op": op,
        "process_set": process_set,
        "prescale_factor": 1.0 / factor,
        "postscale_factor": factor,
    }
    local = process_set if scale_local_gradients else None
    vars(distributed)["_spark_elastic"] = (
        _Passes(backward_passes_per_step, average_aggregated_gradients),
        _Exchange(how, local),
    )
    wrapped: Plain = distributed
    return wrapped


class _Passes:
    """Gradients summed until there are as many as make a step. What a world that is over left unfinished is dropped."""

    def __init__(self, count: int, average: bool) -> None:
        self._count = count
        self._average = average
        self._taken = 0
        self._sums: list[torch.Tensor | None] = []
        self._fence = (0, 0)  # of the world that they are of

    def add(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """The sums once they are complete, else None."""
        if self._count == 1:
            return list(gradients)
        fence = world().fence
        if fence != self._fence:
            self._fence, self._taken = fence, 0
        if self._taken == 0:
            self._sums = [None if g is None else g.detach().clone() for g in gradients]
        else:
            self._sums = [
                a if b is None else (b.detach().clone() if a is None else a + b)
                for a, b in zip(self._sums, gradients, strict=True)
            ]
        self._taken += 1
        if self._taken < self._count:
            return None
        self._taken = 0
        share = 1.0 / self._count if self._average else 1.0
        return [None if g is None else g * share for g in self._sums]


class _Exchange:
    """how: arguments of `grouped_allreduce`. scaled: whose size local gradients are divided by; None: they are not."""

    def __init__(self, how: dict[str, Any], scaled: ProcessSet | None) -> None:
        self.local: set[int] = set()
        self._how = how
        self._scaled = scaled

    def shared(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        of_dtype: dict[torch.dtype, list[int]] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in self.local:
                results[i] = gradient if self._scaled is None else gradient / self._scaled.size()
            else:
                of_dtype.setdefault(gradient.dtype, []).append(i)
        for places in of_dtype.values():
            for i, result in zip(
                places, grouped_allreduce([gradients[i].detach() for i in places], **self._how), strict=True
            ):
                results[i] = result
        return results


class _Distributed:
    """What is added to the optimizer's own class."""

    _spark_elastic: tuple[_Passes, _Exchange]

    def register_local_var(self, var: Any) -> None:
        """The gradient of that variable is not exchanged."""
        self._spark_elastic[1].local.add(id(var))

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange, and apply.

        Raises:
            CollectiveError: the exchange broke; no variable was changed.
        """
        own: Any = super()
        this: Any = self
        variables = this._trainable_variables if trainable_variables is None else list(trainable_variables)
        passes, exchange = self._spark_elastic
        summed = passes.add(list(grads))
        if summed is not None:
            own.apply(exchange.shared(summed, variables), trainable_variables)
