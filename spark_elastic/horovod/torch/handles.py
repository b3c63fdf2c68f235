"""Requests of operations on tensors, handles of those in progress, and gradients. Any thread may use handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from elastic_collectives.group import Array
from spark_elastic.gradients.compiled_callers import disable_compile
from spark_elastic.gradients.host_memory import array_of, get_dtype_name
from spark_elastic.gradients.process_sets import ProcessSet
from spark_elastic.horovod.ops import operations
from spark_elastic.horovod.ops.operation import Operation


def submit(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    awaited: bool = False,
    **how: Any,
) -> Operation:
    """`operations.submit` of contiguous tensors on the CPU, which belong to the operation until it is done."""
    dtypes = tuple(get_dtype_name(each.dtype) for each in tensors)
    arrays = [array_of(each) for each in tensors]
    return operations.submit(kind, name, arrays, process_set, dtypes=dtypes, awaited=awaited, **how)


class Handle:
    """An operation in progress. `synchronize` waits for it, and so does calling the handle."""

    def __init__(self, operation: Operation, finish: Callable[[tuple[Array, ...]], Any]) -> None:
        """
        Args:
            finish: makes the result from the outputs of the operation.
        """
        self.operation = operation
        self._finish = finish
        self._result: Any = None
        self._finished = False

    def poll(self) -> bool:
        return self.operation.poll()

    @disable_compile
    def __call__(self) -> Any:
        outputs = self.operation.wait()
        if not self._finished:
            self._result, self._finished = self._finish(outputs), True
        return self._result

    def first(self) -> Handle:
        """Return the handle of the first tensor of this operation, which gives a list."""
        return Handle(self.operation, lambda _: self()[0])


def poll(handle: Handle) -> bool:
    """Whether `synchronize` returns, or raises, at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for the result: what the function without `_async` returns.

    Raises:
        CollectiveError: the ranks requested different operations, a rank was late, or the world broke.
    """
    return handle()


Gradient: TypeAlias = Callable[..., Sequence[torch.Tensor]]


@disable_compile
def differentiable(
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    gradient: Gradient,
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return what `run` makes of the tensors.

    Args:
        gradient: makes the gradients of the tensors from those of the results, differentiably itself.
    """
    return list(_Differentiable.apply(run, gradient, *tensors))  # type: ignore[no-untyped-call]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Gradient, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.gradient(*upstream)
