"""`allreduce` in all its forms, under Horovod's names. All ranks of the process set must call it.

Names identify operations: ranks may request them in different orders. Unnamed operations are matched by the order in
which each rank requests its unnamed ones. An average of integers is truncated towards zero; 16-bit floats are
accumulated as float32; a bool's sum is "or". All raise `CollectiveError` if ranks disagree or the world broke.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.compiled_callers import disable_compile
from spark_elastic.gradients.host_memory import copy_back, copy_to_host, to_host
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import ReduceOp, ReduceOptions
from spark_elastic.horovod.ops.negotiation import ALLREDUCE
from spark_elastic.horovod.ops.operations import compress_tensors
from spark_elastic.horovod.torch.compression import Compression
from spark_elastic.horovod.torch.handles import Handle, differentiable, submit


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
    return _allreduce([tensor], name, options)[0]


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
    return start([tensor], name, options, in_place=False).first()


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
    return start([tensor], name, options, in_place=True).first()


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
    return _allreduce(tensors, name, options)


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
    all_float32 = all(tensor.dtype == torch.float32 for tensor in working)
    wire, exchanged, decompress = compress_tensors(working, options, all_float32)
    how: dict[str, Any] = {"op": options.op.value, "scale": options.scale, "compression": wire}
    operation = submit(ALLREDUCE, name, exchanged, options.process_set, awaited=awaited, **how)

    def finish(_: object) -> list[torch.Tensor]:
        results = decompress(exchanged)
        if in_place:
            return [copy_back(tensor, result) for tensor, result in zip(tensors, results, strict=True)]
        return [result.to(tensor.device) for tensor, result in zip(tensors, results, strict=True)]

    return Handle(operation, finish)


def _allreduce(
    tensors: Sequence[torch.Tensor], name: str | None, options: ReduceOptions
) -> list[torch.Tensor]:
    return differentiable(
        lambda given: start(given, name, options, in_place=False, awaited=True)(),
        lambda *upstream: _allreduce(upstream, None, options),
        tensors,
    )
