"""The exchange of a Keras optimizer's gradients on the torch backend: one operation per dtype.

The training thread owns everything here. Imported only where Keras runs on torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import is_single_process
from spark_elastic.gradients.reduction import Adasum
from spark_elastic.horovod.ops.distributed_optimizer import (
    GradientOptions,
    OptimizerExchange,
    WrappedOptimizer,
)
from spark_elastic.horovod.torch.allreduce import start


class TorchExchange(OptimizerExchange[torch.Tensor]):
    kind = WrappedOptimizer

    def __init__(self, options: GradientOptions, passes: int, average: bool) -> None:
        if options.reduce.op is Adasum:
            raise InvalidInput(f"on the torch backend of Keras op must be Average or Sum; got {Adasum!r}.")
        super().__init__(options, passes, average)

    @staticmethod
    def copy(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [gradient.clone() for gradient in gradients]

    def exchange(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        results, reduce = list(gradients), self.options.reduce
        if is_single_process(reduce.process_set):
            return results
        local = {id(variable) for variable in self.local}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) not in local:
                by_dtype.setdefault(gradient.dtype, []).append(i)
            elif self.options.scale_local:
                results[i] = gradient / reduce.process_set.size()
        for indices in by_dtype.values():
            dense = [gradients[i].detach() for i in indices]
            reduced = start(dense, None, reduce, in_place=False, awaited=True)()
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
        return results

    def add_pass(self, gradients: list[Any], step: Callable[[list[Any]], None]) -> None:
        sums = self.accumulator.add([None if g is None else g.detach() for g in gradients])
        if sums is not None:
            step(sums)
