"""`DistributedOptimizer` of Keras 3 on the torch backend: gradients are exchanged as one operation a dtype.

Training thread only. Imported where Keras runs on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import keras
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.distributed_optimizer import (
    PassCounter,
    WrappedOptimizer,
    get_exchange,
    wrap_optimizer,
)
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduction import Average, ReduceOp, ReduceOptions, Sum
from spark_elastic.torch.allreduce import start

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
    if isinstance(optimizer, _Distributed):
        raise InvalidInput(
            f"DistributedOptimizer wraps an optimizer of Keras 3 once; got a {type(optimizer).__name__}."
        )
    if op not in (Average, Sum):
        raise InvalidInput(f"on the torch backend of Keras op must be Average or Sum; got {op!r}.")
    how = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)

    def made() -> tuple[_Passes, _Exchange]:
        passes = _Passes(backward_passes_per_step, average_aggregated_gradients)
        return passes, _Exchange(how, scale_local_gradients)

    distributed: Plain = wrap_optimizer(optimizer, _Distributed, made, keras.utils)
    return distributed


class _Passes:
    """Gradients summed until there are as many as make a step. What a world that is over left unfinished is dropped."""

    def __init__(self, count: int, average: bool) -> None:
        self._passes = PassCounter(count)
        self._share = 1.0 / count if average else 1.0
        self._sums: list[torch.Tensor | None] = []

    def add(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """The sums once they are complete, else None."""
        if self._passes.count == 1:
            return list(gradients)
        if self._passes.begin_pass():
            self._sums = [None if g is None else g.detach().clone() for g in gradients]
        else:
            self._sums = [
                a if b is None else (b.detach().clone() if a is None else a + b)
                for a, b in zip(self._sums, gradients, strict=True)
            ]
        if not self._passes.complete_pass():
            return None
        return [None if g is None else g * self._share for g in self._sums]


class _Exchange:
    """local: variables whose gradients are this rank's own; scale_local: they are divided by the size."""

    def __init__(self, how: ReduceOptions, scale_local: bool) -> None:
        self.local: set[int] = set()
        self._how = how
        self._scale_local = scale_local

    def exchange(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        of_dtype: dict[torch.dtype, list[int]] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in self.local:
                results[i] = gradient / self._how.process_set.size() if self._scale_local else gradient
            else:
                of_dtype.setdefault(gradient.dtype, []).append(i)
        for places in of_dtype.values():
            given = [gradients[i].detach() for i in places]
            shared = start(given, None, self._how, in_place=False, awaited=True)()
            for i, result in zip(places, shared, strict=True):
                results[i] = result
        return results


class _Distributed(WrappedOptimizer):
    """What is added to the optimizer's own class."""

    def register_local_var(self, var: Any) -> None:
        """The gradient of that variable is not exchanged."""
        get_exchange(self)[1].local.add(id(var))

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange, and apply.

        Raises:
            CollectiveError: the exchange broke; no variable was changed.
        """
        own: Any = super()
        this: Any = self
        variables = this._trainable_variables if trainable_variables is None else list(trainable_variables)
        passes, exchange = get_exchange(self)
        summed = passes.add(list(grads))
        if summed is not None:
            own.apply(exchange.shared(summed, variables), trainable_variables)
