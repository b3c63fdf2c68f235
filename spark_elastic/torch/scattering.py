"""Alltoall and reducescatter under Horovod's names: as in `allreduce` of names, orders and errors.

Gradients are as in the last releases of Horovod: of an alltoall those of the sum of all ranks' losses, of a
reducescatter these times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.negotiation import ALLTOALL, REDUCESCATTER, Request, qualify_name
from spark_elastic.ops.operations import get_queue
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduction import Average, ReduceOp, ReduceOptions
from spark_elastic.torch.compression import Compression
from spark_elastic.torch.gathering import grouped_allgather
from spark_elastic.torch.tensors import Handle, array_of, disable_compile, name_of, tensor_of, to_host


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank r gets the r-th part of every rank's tensor, cut along dimension 0, in rank order. Differentiable.

    splits: rows for each rank; then the result is (tensor, rows received from each). None: equal parts, and the tensor
    alone.
    """
    received, came = _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return received if splits is None else (received, came)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `alltoall`; not differentiable."""
    handle = _alltoall(tensor, splits, name, process_set)
    return Handle(handle.operation, lambda outputs: handle()[0] if splits is None else handle())


@disable_compile
def _alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Handle:
    working = to_host(tensor)
    if working.dim() == 0:
        raise InvalidInput("alltoall cuts its tensor along the first dimension; a scalar has none.")
    sent = None if splits is None else [int(rows) for rows in splits]
    request = Request(
        ALLTOALL,
        qualify_name(ALLTOALL, name),
        (name_of(working.dtype),),
        ((-1, *working.shape[1:]),),
    )
    operation = get_queue(process_set).submit(request, [array_of(working)], sent)
    return Handle(
        operation,
        lambda outputs: (tensor_of(outputs[0], tensor), torch.from_numpy(outputs[1]).to(torch.int32)),
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's part of what `allreduce` gives, cut along dimension 0; the first ranks have a row more where it does
    not divide. Differentiable for Average and Sum."""
    how = ReduceOptions.from_reducescatter_args(
        1, op, (prescale_factor, postscale_factor), process_set, compression
    )
    return _ReduceScatter.apply(how, name, tensor)[0]  # type: ignore[no-any-return, no-untyped-call]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter`; not differentiable."""
    handle = grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)
    return Handle(handle.operation, lambda outputs: handle()[0])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors as one operation. Differentiable for Average and Sum."""
    scale = prescale_factor, postscale_factor
    how = ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set, compression)
    return list(_ReduceScatter.apply(how, name, *tensors))  # type: ignore[no-untyped-call]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `grouped_reducescatter`; not differentiable."""
    scale = prescale_factor, postscale_factor
    return _start(tensors, name, ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set))


@disable_compile
def _start(tensors: Sequence[torch.Tensor], name: str | None, how: ReduceOptions) -> Handle:
    squeezed = [how.compression.compress(to_host(tensor)) for tensor in tensors]
    working = [tensor for tensor, _ in squeezed]
    request = Request(
        REDUCESCATTER,
        qualify_name(REDUCESCATTER, name),
        tuple(name_of(each.dtype) for each in working),
        tuple(tuple(each.shape) for each in working),
        how.op.value,
        how.scale,
    )
    operation = get_queue(how.process_set).submit(request, [array_of(each) for each in working])

    def finish(outputs: Any) -> list[torch.Tensor]:
        parts = [tensor_of(array, like) for array, like in zip(outputs, working, strict=True)]
        return [
            how.compression.decompress(part, ctx).to(tensor.device)
            for part, (_, ctx), tensor in zip(parts, squeezed, tensors, strict=True)
        ]

    return Handle(operation, finish)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, came = _alltoall(tensor, splits, name, process_set)()
        ctx.came, ctx.process_set = came.tolist(), process_set
        ctx.mark_non_differentiable(came)
        return received, came

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back, _ = _AllToAll.apply(gradients[0], ctx.came, None, ctx.process_set)  # type: ignore[no-untyped-call]
        return back, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: ReduceOptions, name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(_start(tensors, name, how)())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how: ReduceOptions = ctx.how
        factor = how.reducescatter_gradient_factor(how.process_set.size)
        wholes = grouped_allgather(gradients, process_set=how.process_set)
        return None, None, *(whole * factor for whole in wholes)
