"""`allreduce` in all its forms, under Horovod's names. All ranks of the process set must call it.

Names identify operations: ranks may request them in different orders. Unnamed operations are matched by the order in
which each rank requests its unnamed ones. An average of integers is truncated towards zero; 16-bit floats are
accumulated as float32; a bool's sum is "or". All raise `CollectiveError` if ranks disagree or the world broke.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.compiled_callers import disable_compile
from spark_elastic.gradients.host_memory import copy_back, copy_to_host, to_host
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import ReduceOp, ReduceOptions
from spark_elastic.horovod.ops.negotiation import ALLREDUCE
from spark_elastic.horovod.torch.compression import Compression
from spark_elastic.horovod.torch.handles import Handle, submit


def allreduce(  # noqa: PLR0913 - name and arguments are Horovod's
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the average (default) or another reduction of all ranks' tensors of one shape. Differentiable."""
    options = ReduceOptions.from_args(
        average, op, (prescale_factor, postscale_factor), process_set, compression
    )
    return _AllReduce.apply(options, name, tensor)[0]  # type: ignore[no-any-return, no-untyped-call]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce` without waiting; not differentiable."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return _single(start([tensor], name, options, in_place=False))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` into `tensor`."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start([tensor], name, options, in_place=True, awaited=True)()[0]  # type: ignore[no-any-return]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_` without waiting. The tensor belongs to the operation until its handle is done."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return _single(start([tensor], name, options, in_place=True))


def grouped_allreduce(  # noqa: PLR0913
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Allreduce several tensors as one operation. Differentiable."""
    options = ReduceOptions.from_args(
        average, op, (prescale_factor, postscale_factor), process_set, compression
    )
    return list(_AllReduce.apply(options, name, *tensors))  # type: ignore[no-untyped-call]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce` without waiting; not differentiable."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`grouped_allreduce` into `tensors`."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=True, awaited=True)()  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce_` without waiting."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=True)


@disable_compile
def start(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    options: ReduceOptions,
    in_place: bool,
    awaited: bool = False,
) -> Handle:
    """Request an allreduce; its handle returns a list of tensors. awaited: the caller waits for it at once."""
    if not tensors:
        raise InvalidInput("a grouped operation takes at least one tensor.")
    working = [to_host(tensor) if in_place else copy_to_host(tensor) for tensor in tensors]
    wire, decompress = _compress(working, options)
    operation = submit(
        ALLREDUCE,
        name,
        working,
        options.process_set,
        awaited=awaited,
        op=options.op.value,
        scale=options.scale,
        compression=wire,
    )

    def finish(_: object) -> list[torch.Tensor]:
        results = decompress(working)
        if in_place:
            return [copy_back(tensor, result) for tensor, result in zip(tensors, results, strict=True)]
        return [result.to(tensor.device) for tensor, result in zip(tensors, results, strict=True)]

    return Handle(operation, finish)


def _compress(
    working: list[torch.Tensor], options: ReduceOptions
) -> tuple[str | None, Callable[[list[torch.Tensor]], list[torch.Tensor]]]:
    """Replace `working` by what is exchanged. Returns (the engine's wire format, a function that decompresses)."""
    wire = options.choose_wire_format(all(tensor.dtype == torch.float32 for tensor in working))
    if wire is not None:
        return wire, lambda results: results
    compressed = [options.compression.compress(tensor) for tensor in working]
    working[:] = [tensor for tensor, _ in compressed]

    def decompress(results: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            options.compression.decompress(result, ctx)
            for result, (_, ctx) in zip(results, compressed, strict=True)
        ]

    return None, decompress


def _single(handle: Handle) -> Handle:
    return Handle(handle.operation, lambda outputs: handle()[0])


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: ReduceOptions, name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.options = options
        return tuple(start(tensors, name, options, in_place=False, awaited=True)())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_AllReduce.apply(ctx.options, None, *gradients)  # type: ignore[no-untyped-call]
