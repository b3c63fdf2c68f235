"""Carries out operations on a group, in the order that all ranks decided. The channel's thread only.

Small reductions of one kind that are due together travel as one: the same ones on every rank, since what is due is the
same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elastic_collectives import Group
from elastic_collectives.arithmetic import narrowed
from elastic_collectives.group import Array
from elastic_collectives.operands import as_array, as_reduction, as_rows, checked_root, checked_splits
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.rounds import request as kinds
from spark_elastic.ops.rounds.operation import Operation
from spark_elastic.ops.rounds.request import Request

FUSED_AT_MOST = 1 << 20  # bytes of one operation; copying more of it costs more than a call of its own


@dataclass(frozen=True)
class Task:
    """One operation that is due. own: this rank's; None where it has joined and never asked for it."""

    label: str
    request: Request
    own: Operation | None


def batches(tasks: Sequence[Task], threshold: int) -> Iterator[list[Task]]:
    """Tasks to be carried out together, at most `threshold` bytes of them. The same on every rank."""
    open_batches: dict[object, list[Task]] = {}
    sizes: dict[object, int] = {}
    for task in tasks:
        size, key = nbytes(task.request), _fusion_key(task.request)
        if key is None or size > min(FUSED_AT_MOST, threshold):
            yield [task]
            continue
        if sizes.get(key, 0) + size > threshold:
            yield open_batches.pop(key)
            sizes[key] = 0
        open_batches.setdefault(key, []).append(task)
        sizes[key] = sizes.get(key, 0) + size
    yield from open_batches.values()


def nbytes(request: Request) -> int:
    """Bytes of all arrays of a reduction."""
    return sum(
        _itemsize(name) * math.prod(shape) for name, shape in zip(request.dtypes, request.shapes, strict=True)
    )


def _fusion_key(request: Request) -> object | None:
    if request.kind != kinds.ALLREDUCE or request.op == "adasum" or len(set(request.dtypes)) != 1:
        return None
    return request.dtypes[0], request.op, request.scale, request.compression


def check(own: Operation, size: int) -> None:
    """Check an operation before peers hear of it.

    Raises:
        InvalidInput: its arrays, or what is asked for, make no sense.
    """
    request = own.request
    try:
        for array, name in zip(own.arrays, request.dtypes, strict=True):
            if request.kind in (kinds.ALLREDUCE, kinds.REDUCESCATTER):
                view = as_array(array, writable=request.kind == kinds.ALLREDUCE)
                as_reduction(view, request.op, name, None, request.scale, request.compression)
            if request.kind in (kinds.REDUCESCATTER, kinds.ALLGATHER, kinds.ALLTOALL):
                as_rows(array)
        if request.kind == kinds.ALLTOALL:
            checked_splits(len(own.arrays[0]), own.splits, size)
        checked_root(request.root, size)
    except ValueError as error:
        raise InvalidInput(f"{own.label!r}: {error}") from error


def carry_out(group: Group, batch: Sequence[Task]) -> None:
    """Settles the operations of a batch.

    Raises:
        CollectiveError: the group broke; none of them is settled.
    """
    request = batch[0].request
    if request.kind == kinds.ALLREDUCE:
        _allreduce(group, batch)
        return
    own = batch[0].own
    if request.kind == kinds.BARRIER:
        group.barrier()
        outputs: tuple[Array, ...] = ()
    else:
        assert own is not None  # only reductions and barriers can do without
        outputs = _outputs(group, own)
    if own is not None:
        own.settle(outputs)


def _outputs(group: Group, own: Operation) -> tuple[Array, ...]:
    request = own.request
    if request.kind == kinds.BROADCAST:
        for array in own.arrays:
            group.broadcast(array, request.root)
        return own.arrays
    if request.kind == kinds.ALLGATHER:
        return tuple(np.concatenate(group.allgatherv(array)) for array in own.arrays)
    if request.kind == kinds.ALLTOALL:
        rows, came = group.alltoall(own.arrays[0], own.splits)
        return rows, np.array(came, np.int64)
    assert request.kind == kinds.REDUCESCATTER
    return tuple(
        group.reducescatter(array, request.op, name, None, request.scale, request.compression)
        for array, name in zip(own.arrays, request.dtypes, strict=True)
    )


def _allreduce(group: Group, batch: Sequence[Task]) -> None:
    request = batch[0].request
    arrays: dict[str, list[Array]] = {}
    for task in batch:
        own = neutral(task.request) if task.own is None else task.own.arrays
        for name, array in zip(task.request.dtypes, own, strict=True):
            arrays.setdefault(name, []).append(array)
    for name, alike in arrays.items():
        if len(alike) == 1:
            group.allreduce(
                alike[0], request.op, dtype=name, scale=request.scale, compression=request.compression
            )
        else:
            group.grouped_allreduce(alike, request.op, name, None, request.scale, request.compression)
    for task in batch:
        if task.own is not None:
            task.own.settle(task.own.arrays)


def neutral(request: Request) -> tuple[Array, ...]:
    """What a rank that has joined adds to a reduction: nothing that changes its result."""
    return tuple(
        narrowed(np.full(shape, _neutral_element(request.op, name), _plain(name)), name)
        for name, shape in zip(request.dtypes, request.shapes, strict=True)
    )


def _neutral_element(op: str, name: str) -> float:
    if op not in ("min", "max", "product"):
        return 0
    if op == "product":
        return 1
    kind = np.dtype(_plain(name))
    if kind.kind == "f":
        return np.inf if op == "min" else -np.inf
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    if limits is None:  # bool: min is "and", max is "or"
        return op == "min"
    return int(limits.max if op == "min" else limits.min)


def _plain(name: str) -> str:
    """The dtype in which numpy computes it, since numpy has no bfloat16."""
    return "float32" if name in ("bfloat16", "float16") else name


def _itemsize(name: str) -> int:
    return 2 if name == "bfloat16" else np.dtype(name).itemsize
