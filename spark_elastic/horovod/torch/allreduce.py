"""`allreduce` in all its forms, under Horovod's names. All ranks of the process set must call it.

Names identify operations: ranks may request them in different orders. Unnamed operations are matched by the order in
which each rank requests its unnamed ones. An average of integers is truncated towards zero; 16-bit floats are
accumulated as float32; a bool's sum is "or". All raise `CollectiveError` if ranks disagree or the world broke. Any
thread may use handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.hooks import disable_compile
from spark_elastic.gradients.host_memory import array_of, copy_back, copy_to_host, get_dtype_name, to_host
from spark_elastic.gradients.process_sets import ALL, ProcessSet
from spark_elastic.gradients.reduction import ReduceOp, ReduceOptions
from spark_elastic.horovod.ops import operations
from spark_elastic.horovod.ops.compression import Compression
from spark_elastic.horovod.ops.negotiation import Kind
from spark_elastic.horovod.ops.operation import Operation
from spark_elastic.horovod.ops.operations import compress_tensors

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]

Tensors: TypeAlias = Sequence[Tensor]


def submit(
    kind: Kind, name: str | None, tensors: Tensors, process_set: ProcessSet, awaited: bool = False, **how: Any
) -> Operation:
    """`operations.submit` of contiguous tensors on the CPU, which belong to the operation until it is done."""
    dtypes = tuple(get_dtype_name(tensor.dtype) for tensor in tensors)
    arrays = [array_of(tensor) for tensor in tensors]
    return operations.submit(kind, name, arrays, process_set, dtypes=dtypes, awaited=awaited, **how)


class Handle:
    """An operation in progress. `synchronize` waits for it, and so does calling the handle."""

    def __init__(self, operation: Operation, finish: Callable[[tuple[Array, ...]], Any]) -> None:
        """finish: makes the result from the outputs of the operation."""
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


Gradient: TypeAlias = Callable[..., Tensors]


@disable_compile
def differentiable(run: Gradient, gradient: Gradient, tensors: Tensors) -> list[Tensor]:
    """Return what `run` makes of the tensors. gradient: makes their gradients from those of the results,
    differentiably itself."""
    return list(_Differentiable.apply(run, gradient, *tensors))  # type: ignore[no-untyped-call]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Gradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradient(*upstream)


def allreduce(  # noqa: PLR0913 - name and arguments are Horovod's
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Tensor:
    """Return the average (default) or another reduction of all ranks' tensors of one shape. Differentiable."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_args(average, op, scale, process_set, compression)
    return _allreduce([tensor], name, options)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Handle:
    """`allreduce` without waiting; not differentiable."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start([tensor], name, options, in_place=False).first()


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Tensor:
    """`allreduce` into `tensor`."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start([tensor], name, options, in_place=True, awaited=True)()[0]  # type: ignore[no-any-return]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Handle:
    """`allreduce_` without waiting. The tensor belongs to the operation until its handle is done."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start([tensor], name, options, in_place=True).first()


def grouped_allreduce(  # noqa: PLR0913
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> list[Tensor]:
    """Allreduce several tensors as one operation. Differentiable."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_args(average, op, scale, process_set, compression)
    return _allreduce(tensors, name, options)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Handle:
    """`grouped_allreduce` without waiting; not differentiable."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=False)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> list[Tensor]:
    """`grouped_allreduce` into `tensors`."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=True, awaited=True)()  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Handle:
    """`grouped_allreduce_` without waiting."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=True)


@disable_compile
def start(
    tensors: Tensors, name: str | None, options: ReduceOptions, in_place: bool, awaited: bool = False
) -> Handle:
    """Request an allreduce; its handle returns a list of tensors. awaited: the caller waits for it at once."""
    if not tensors:
        raise InvalidInput("a grouped operation takes at least one tensor.")
    working = [to_host(tensor) if in_place else copy_to_host(tensor) for tensor in tensors]
    all_float32 = all(tensor.dtype == torch.float32 for tensor in working)
    wire, exchanged, decompress = compress_tensors(working, options, all_float32)
    how: dict[str, Any] = {"op": options.op.value, "scale": options.scale, "compression": wire}
    operation = submit("allreduce", name, exchanged, options.process_set, awaited=awaited, **how)

    def finish(_: object) -> list[Tensor]:
        results = decompress(exchanged)
        if in_place:
            return [copy_back(tensor, result) for tensor, result in zip(tensors, results, strict=True)]
        return [result.to(tensor.device) for tensor, result in zip(tensors, results, strict=True)]

    return Handle(operation, finish)


def _allreduce(tensors: Tensors, name: str | None, options: ReduceOptions) -> list[Tensor]:
    def run(operands: Tensors) -> list[Tensor]:
        return start(operands, name, options, in_place=False, awaited=True)()  # type: ignore[no-any-return]

    return differentiable(run, lambda *upstream: _allreduce(upstream, None, options), tensors)
