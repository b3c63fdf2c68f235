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
from spark_elastic.horovod.ops.operations import compress_tensors
from spark_elastic.horovod.torch.compression import Compression
from spark_elastic.horovod.torch.gathering import grouped_allgather
from spark_elastic.horovod.torch.handles import Handle, differentiable, submit


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
    came: list[torch.Tensor] = []  # rows received from each rank

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        received, counts = _alltoall(given[0], splits, name, process_set)()
        came.append(counts)
        return [received]

    received = differentiable(run, lambda back: [alltoall(back, came[0], None, process_set)[0]], [tensor])[0]
    return received if splits is None else (received, came[0])


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
    operation = submit(ALLTOALL, name, [working], process_set, splits=sent)
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
    return _reducescatter([tensor], name, options)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter` without waiting; not differentiable."""
    scale = prescale_factor, postscale_factor
    return grouped_reducescatter_async([tensor], name, op, process_set, *scale).first()


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
    return _reducescatter(tensors, name, options)


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
    hosts = [to_host(tensor) for tensor in tensors]
    _, exchanged, decompress = compress_tensors(hosts, options, all_float32=False)
    how: dict[str, Any] = {"op": options.op.value, "scale": options.scale}
    operation = submit(REDUCESCATTER, name, exchanged, options.process_set, **how)

    def finish(outputs: Any) -> list[torch.Tensor]:
        parts = [tensor_of(array, like) for array, like in zip(outputs, exchanged, strict=True)]
        return [part.to(t.device) for part, t in zip(decompress(parts), tensors, strict=True)]

    return Handle(operation, finish)


def _reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None, options: ReduceOptions
) -> list[torch.Tensor]:
    def gradient(*upstream: torch.Tensor) -> list[torch.Tensor]:
        factor = options.reducescatter_gradient_factor(options.process_set.size)
        wholes = grouped_allgather(upstream, process_set=options.process_set)
        return [whole * factor for whole in wholes]

    return differentiable(lambda given: _start(given, name, options)(), gradient, tensors)
