"""Collectives on torch tensors under Horovod's names, differentiable as there. Training thread only.

Each waits for gradients that are on their way: one collective at a time. A process that is no worker is a world of one.
All raise `CollectiveError` where the world broke.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from elastic_collectives import Group, MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.torch.reduce_op import Average, ReduceOp, Sum
from spark_elastic.torch.topology import free_group

_EXCHANGED = {torch.float32, torch.float64, torch.int32, torch.int64}


def allreduce(  # noqa: PLR0913 - name and arguments are Horovod's
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: object = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """The average (default) or sum of all ranks' tensors, of equal shapes. name: for people; order identifies.

    The average of integers is rounded down. 16-bit floats are summed in float32.
    """
    _refuse("allreduce", compression=compression, process_set=process_set)
    if average is not None and op is not None:
        raise InvalidInput(
            "allreduce takes either average or op, and op is the newer one: leave average out."
        )
    chosen = op if op is not None else (Sum if average is False else Average)
    if chosen not in (Average, Sum):
        raise InvalidInput(f"op must be Average or Sum; got {chosen!r}.")
    return _AllReduce.apply(tensor, chosen, prescale_factor, postscale_factor)  # type: ignore[no-any-return, no-untyped-call]


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: object = None) -> torch.Tensor:
    """All ranks' tensors, one after the other along dimension 0, in which they may differ."""
    _refuse("allgather", process_set=process_set)
    return _AllGather.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """The tensor of rank `root_rank`, on all ranks."""
    _refuse("broadcast", process_set=process_set)
    return _Broadcast.apply(tensor, root_rank)  # type: ignore[no-any-return, no-untyped-call]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """As `broadcast`, into `tensor`."""
    _refuse("broadcast_", process_set=process_set)
    group = free_group()
    if group is not None:
        with torch.no_grad():
            tensor.copy_(_broadcast(group, tensor, root_rank))
    return tensor


def barrier(process_set: object = None) -> None:
    """Return once all ranks have called it."""
    _refuse("barrier", process_set=process_set)
    group = free_group()
    if group is not None:
        group.barrier()


def _refuse(function: str, **arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InvalidInput(f"{function} does not support {name} yet: leave it out.")


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: ReduceOp, before: float, after: float) -> torch.Tensor:
        ctx.how = op, before, after
        return _reduced(tensor, op, before, after)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _reduced(gradients[0], *ctx.how), None, None, None


def _reduced(tensor: torch.Tensor, op: ReduceOp, before: float, after: float) -> torch.Tensor:
    group = free_group()
    kind = tensor.dtype if tensor.dtype in _EXCHANGED else None
    if kind is None:
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
    working = tensor.detach().to(kind).cpu().clone(memory_format=torch.contiguous_format)
    if before != 1.0:
        working = (working * before).to(kind)
    if group is not None:
        group.allreduce(working.reshape(-1).numpy())
        if op is Average:
            working = (
                working / group.size
                if kind.is_floating_point
                else working.div(group.size, rounding_mode="floor")
            )
    if after != 1.0:
        working = (working * after).to(kind)
    return working.to(tensor.dtype).to(tensor.device)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts, mine = _gathered(tensor)
        ctx.lengths, ctx.mine, ctx.scalar = [len(part) for part in parts], mine, tensor.dim() == 0
        return torch.cat(parts).to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        first = sum(ctx.lengths[: ctx.mine])
        share = _reduced(gradients[0], Sum, 1.0, 1.0)[first : first + ctx.lengths[ctx.mine]]
        return share.reshape(()) if ctx.scalar else share


def _gathered(tensor: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """(all ranks' tensors, this rank)"""
    dense = tensor.detach().cpu().contiguous()
    dense = dense.reshape(1) if dense.dim() == 0 else dense
    group = free_group()
    if group is None:
        return [dense.clone()], 0
    heads = [
        head.decode() for head in group.allgather_bytes(f"{dense.dtype} {list(dense.shape[1:])}".encode())
    ]
    off = [other for other, head in enumerate(heads) if head != heads[0]]
    if off:
        raise MismatchError(off, f"allgather got {heads[0]} on rank 0 and {heads[off[0]]} on rank {off[0]}")
    raw = group.allgather_bytes(_memory(dense).tobytes())
    return [
        torch.from_numpy(np.frombuffer(part, np.uint8).copy()).view(dense.dtype).reshape(-1, *dense.shape[1:])
        if part
        else dense.new_empty((0, *dense.shape[1:]))
        for part in raw
    ], group.rank


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int) -> torch.Tensor:
        group = free_group()
        ctx.is_root = group is None or group.rank == root
        return tensor.detach().clone() if group is None else _broadcast(group, tensor, root)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        summed = _reduced(gradients[0], Sum, 1.0, 1.0)
        return (summed if ctx.is_root else torch.zeros_like(summed)), None


def _broadcast(group: Group, tensor: torch.Tensor, root: int) -> torch.Tensor:
    working = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if working.numel():
        group.broadcast(_memory(working), root)
    return working.to(tensor.device)


def _memory(dense: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else np.empty(0, np.uint8)
