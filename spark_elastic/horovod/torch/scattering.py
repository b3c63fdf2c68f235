"""Alltoall and reducescatter under Horovod's names; names, order and errors are as in `allreduce`.

Gradients are as in the last releases of Horovod: those of an alltoall belong to the sum of all ranks' losses, those of
a reducescatter to that sum times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.compiled_callers import disable_compile
from spark_elastic.gradients.host_memory import tensor_of, to_host
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import Average, ReduceOp, ReduceOptions
from spark_elastic.horovod.ops.negotiation import ALLTOALL, REDUCESCATTER
from spark_elastic.horovod.torch.compression import Compression
from spark_elastic.horovod.torch.gathering import grouped_allgather
from spark_elastic.horovod.torch.handles import Handle, submit


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send part r of the tensor, cut along dimension 0, to rank r; return the received parts in rank order.

    Differentiable.

    Args:
        splits: rows for each rank; the result is then (tensor, rows received from each rank). None: equal parts.
    """
    received, counts = _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return received if splits is None else (received, counts)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`alltoall` without waiting; not differentiable."""
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
    operation = submit(ALLTOALL, name, [working], process_set, sent, ragged=True)
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
    """Return this rank's part of the reduced tensor, cut along dimension 0; the first ranks get one row more if the
    rows cannot be divided evenly. Differentiable for Average and Sum."""
    options = ReduceOptions.from_reducescatter_args(
        1, op, (prescale_factor, postscale_factor), process_set, compression
    )
    return _ReduceScatter.apply(options, name, tensor)[0]  # type: ignore[no-any-return, no-untyped-call]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter` without waiting; not differentiable."""
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
    """Reducescatter several tensors as one operation. Differentiable for Average and Sum."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set, compression)
    return list(_ReduceScatter.apply(options, name, *tensors))  # type: ignore[no-untyped-call]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`grouped_reducescatter` without waiting; not differentiable."""
    scale = prescale_factor, postscale_factor
    return _start(tensors, name, ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set))


@disable_compile
def _start(tensors: Sequence[torch.Tensor], name: str | None, options: ReduceOptions) -> Handle:
    compressed = [options.compression.compress(to_host(tensor)) for tensor in tensors]
    working = [tensor for tensor, _ in compressed]
    operation = submit(
        REDUCESCATTER, name, working, options.process_set, op=options.op.value, scale=options.scale
    )

    def finish(outputs: Any) -> list[torch.Tensor]:
        parts = [tensor_of(array, like) for array, like in zip(outputs, working, strict=True)]
        return [
            options.compression.decompress(part, ctx).to(tensor.device)
            for part, (_, ctx), tensor in zip(parts, compressed, tensors, strict=True)
        ]

    return Handle(operation, finish)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, counts = _alltoall(tensor, splits, name, process_set)()
        ctx.counts, ctx.process_set = counts.tolist(), process_set
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back, _ = _AllToAll.apply(gradients[0], ctx.counts, None, ctx.process_set)  # type: ignore[no-untyped-call]
        return back, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: ReduceOptions, name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.options = options
        return tuple(_start(tensors, name, options)())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        options: ReduceOptions = ctx.options
        factor = options.reducescatter_gradient_factor(options.process_set.size)
        wholes = grouped_allgather(gradients, process_set=options.process_set)
        return None, None, *(whole * factor for whole in wholes)
