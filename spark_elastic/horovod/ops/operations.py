"""Operations in the current world, for the torch, TensorFlow and Keras halves: on numpy arrays and on objects.

In all halves names identify operations: ranks may request them in different orders. Unnamed operations are matched by
the order in which each rank requests its unnamed ones. An average of integers is truncated towards zero; 16-bit floats
are accumulated as float32; a bool's sum is "or". All raise `CollectiveError` if ranks disagree or the world broke.
Gradients are as in the last releases of Horovod: those of an allgather or broadcast belong to the average of all ranks'
losses, those of an alltoall to their sum, those of a reducescatter to that sum times the number of ranks.

The operation queues of a world are made on first use and end with its group. Any thread may call everything here; all
functions return when their operation is done. Arrays are contiguous; besides numpy's dtypes they may have the bfloat16
of the package ml_dtypes.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from elastic_collectives.operands import Array
from spark_elastic.clock import SystemClock
from spark_elastic.config import operations_from_env
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import (
    ALL,
    ProcessSet,
    check_alone,
    choose_channel,
    find_root_index,
    is_added,
    world,
)
from spark_elastic.gradients.reduction import Average, ReduceOptions
from spark_elastic.gradients.timeline import get_timeline
from spark_elastic.horovod.ops.negotiation import Kind, OperationRequest
from spark_elastic.horovod.ops.operation_queue import Arrays, Operation, OperationQueue
from spark_elastic.runs.snapshot import pickle_value
from spark_elastic.worker.context import get_context, get_group_context

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
AVERAGE = ReduceOptions(Average)
RAGGED = ("allgather", "alltoall")  # the first dimension of their arrays may differ between ranks


class _Queues(dict[tuple[int, ...], OperationQueue]):
    """The operation queues of one world, by the declared ranks of their process sets, to which names belong."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.limits = operations_from_env()


def get_queue(process_set: ProcessSet = ALL) -> OperationQueue:
    """Return the queue to which operations of that set are submitted in the current world; it must be an added set of
    this rank."""
    if not isinstance(process_set, ProcessSet):
        raise InvalidInput(f"process_set must be a ProcessSet; got {type(process_set).__name__}.")
    if not is_added(process_set):
        raise InvalidInput(f"{process_set} is not usable yet: add_process_set() first, on all ranks.")
    check_alone("an operation such as allreduce", "use torch.distributed")
    group = world()
    if group.rank not in process_set.ranks:
        raise InvalidInput(f"rank {group.rank} is not in {process_set}: let its members alone call this.")
    queues, ranks = get_group_context().get_or_create(_Queues), process_set.declared_ranks
    with queues.lock:
        if ranks not in queues:
            if group.size > 1:
                # With a subgroup and a thread for each set, operations never wait for gradients, nor the reverse.
                group = group.subgroup(choose_channel("operations", ranks), process_set.ranks)
            name = "" if process_set is ALL else repr(process_set)
            worker = get_context()
            wait = nullcontext if worker is None else worker.wait_recorder.record_wait
            queues[ranks] = OperationQueue(group, SystemClock(), queues.limits, name, wait)
        queue = queues[ranks]
    queue.timeline = get_timeline()
    return queue


def barrier(process_set: ProcessSet = ALL) -> None:
    """Return once all ranks of the set have called it."""
    get_queue(process_set).submit(OperationRequest("barrier"), awaited=True).wait()


def submit(
    kind: Kind,
    name: str | None,
    arrays: Arrays,
    process_set: ProcessSet,
    splits: list[int] | None = None,
    *,
    dtypes: tuple[str, ...] | None = None,
    awaited: bool = True,
    **fields: Any,
) -> Operation:
    """Request an operation on contiguous arrays, which belong to it until it is done. name: the user's; names of
    different kinds are apart. splits: of an alltoall; None: equal parts. dtypes: None: the arrays' own. fields:
    further ones of the `OperationRequest`."""
    label = None if name is None else f"{kind}.{name}"
    shapes = tuple((-1, *array.shape[1:]) if kind in RAGGED else tuple(array.shape) for array in arrays)
    names = dtypes or tuple(array.dtype.name for array in arrays)
    request = OperationRequest(kind, label, names, shapes, **fields)
    # The engine takes the memory of bfloat16 as uint16.
    operands = [a.view(np.uint16) if a.dtype.name == "bfloat16" else a for a in arrays]
    return get_queue(process_set).submit(request, operands, splits, awaited=awaited)


def allreduce_arrays(
    arrays: Arrays, name: str | None = None, options: ReduceOptions = AVERAGE, wire: str | None = None
) -> None:
    """Allreduce arrays in place, as one operation. wire: how the engine compresses them."""
    how: dict[str, Any] = {"op": options.op.value, "scale": options.scale, "compression": wire}
    submit("allreduce", name, arrays, options.process_set, **how).wait()


def broadcast_arrays(
    arrays: Arrays, root_rank: int, name: str | None = None, process_set: ProcessSet = ALL
) -> None:
    """Broadcast arrays in place, as one operation, from the rank `root_rank` of the world."""
    submit("broadcast", name, arrays, process_set, root=find_root_index(process_set, root_rank)).wait()


def allgather_arrays(arrays: Arrays, name: str | None = None, process_set: ProcessSet = ALL) -> list[Array]:
    """Return the rows of all ranks, in rank order. The arrays travel as one operation."""
    rows = submit("allgather", name, arrays, process_set).wait()
    return [result.view(array.dtype) for result, array in zip(rows, arrays, strict=True)]


def reducescatter_arrays(
    arrays: Arrays, name: str | None = None, options: ReduceOptions = AVERAGE
) -> list[Array]:
    """Return this rank's rows of the reduced arrays. They travel as one operation."""
    how: dict[str, Any] = {"op": options.op.value, "scale": options.scale}
    rows = submit("reducescatter", name, arrays, options.process_set, **how).wait()
    return [result.view(array.dtype) for result, array in zip(rows, arrays, strict=True)]


def compress_tensors(
    tensors: Sequence[T], options: ReduceOptions, all_float32: bool
) -> tuple[str | None, list[T], Callable[[Sequence[T]], list[T]]]:
    """Return (the engine's wire format, what to exchange, a function that decompresses the results)."""
    wire = options.choose_wire_format(all_float32)
    if wire is not None:
        return wire, list(tensors), list
    compressed = [options.compression.compress(tensor) for tensor in tensors]

    def decompress(results: Sequence[T]) -> list[T]:
        kind, pairs = options.compression, zip(results, compressed, strict=True)
        return [kind.decompress(result, ctx) for result, (_, ctx) in pairs]

    return None, [tensor for tensor, _ in compressed], decompress


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = ALL) -> T:
    """Return the object of rank `root_rank`."""
    if process_set.size() == 1:
        return obj
    is_root = process_set.rank() == find_root_index(process_set, root_rank)
    mine = _to_bytes(obj) if is_root else np.empty(0, np.uint8)
    name = name or "object"
    length = np.array([len(mine)], np.int64)
    broadcast_arrays([length], root_rank, f"{name}.length", process_set)
    data = mine if is_root else np.empty(int(length[0]), np.uint8)
    broadcast_arrays([data], root_rank, f"{name}.data", process_set)
    return obj if is_root else _from_bytes(data)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = ALL) -> list[T]:
    """Return the objects of all ranks, in rank order."""
    mine, name = _to_bytes(obj), name or "object"
    (lengths,) = allgather_arrays([np.array([len(mine)], np.int64)], f"{name}.length", process_set)
    (data,) = allgather_arrays([mine], f"{name}.data", process_set)
    return [_from_bytes(part) for part in np.split(data, np.cumsum(lengths)[:-1])]


def _to_bytes(obj: object) -> Bytes:
    return np.frombuffer(bytearray(pickle_value(obj)), np.uint8)


def _from_bytes(data: Array) -> Any:
    """An object of an authenticated peer, which has proved that it holds the job's key."""
    return pickle.loads(data.tobytes())
