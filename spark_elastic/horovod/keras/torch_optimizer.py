"""`DistributedOptimizer` of Keras 3 on the torch backend: exchanges gradients as one operation per dtype.

The training thread owns everything here. Imported only where Keras runs on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import keras
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set, is_single_process
from spark_elastic.gradients.reduction import Average, ReduceOp, ReduceOptions, Sum
from spark_elastic.horovod.ops.distributed_optimizer import (
    GradientAccumulator,
    WrappedOptimizer,
    get_exchange,
    wrap_optimizer,
)
from spark_elastic.horovod.torch.allreduce import start

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
    if op not in (Average, Sum):
        raise InvalidInput(f"on the torch backend of Keras op must be Average or Sum; got {op!r}.")
    options = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)

    def make_exchange() -> tuple[GradientAccumulator[torch.Tensor], _Exchange]:
        accumulator = GradientAccumulator[torch.Tensor](
            backward_passes_per_step,
            average_aggregated_gradients,
            lambda tensors: [t.clone() for t in tensors],
        )
        return accumulator, _Exchange(options, scale_local_gradients)

    distributed: Plain = wrap_optimizer(optimizer, _Distributed, make_exchange, keras.utils)
    return distributed


class _Exchange:
    """The exchange of one optimizer's gradients."""

    def __init__(self, options: ReduceOptions, scale_local: bool) -> None:
        """
        Args:
            scale_local: divide the gradients of local variables by the size of the process set.
        """
        self.local: set[int] = set()  # ids of variables whose gradients are not exchanged
        self._options = options
        self._scale_local = scale_local

    def exchange(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks, in the order of `variables`."""
        results = list(gradients)
        if is_single_process(self._options.process_set):
            return results
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) in self.local:
                results[i] = gradient / self._options.process_set.size() if self._scale_local else gradient
            else:
                by_dtype.setdefault(gradient.dtype, []).append(i)
        for indices in by_dtype.values():
            dense = [gradients[i].detach() for i in indices]
            reduced = start(dense, None, self._options, in_place=False, awaited=True)()
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
        return results


class _Distributed(WrappedOptimizer):
    """The methods that `DistributedOptimizer` puts before those of the optimizer's own class."""

    def register_local_var(self, var: Any) -> None:
        """Do not exchange the gradient of that variable."""
        get_exchange(self)[1].local.add(id(var))

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients and apply them.

        Raises:
            CollectiveError: the exchange broke; no variable was changed.
        """
        own: Any = super()
        this: Any = self
        variables = this._trainable_variables if trainable_variables is None else list(trainable_variables)
        accumulator, exchange = get_exchange(self)
        sums: list[Any] | None = list(grads)
        if accumulator.passes > 1:
            sums = accumulator.add([None if g is None else g.detach() for g in grads])
        if sums is not None:
            own.apply(exchange.exchange(sums, variables), trainable_variables)
