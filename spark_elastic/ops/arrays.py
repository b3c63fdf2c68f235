"""Operations on numpy arrays, for what needs no tensor of a framework. Any thread; all return when they are done.

Arrays are contiguous. bfloat16, a dtype that only the package ml_dtypes gives numpy, is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_collectives.group import Array
from spark_elastic.ops.channels import get_queue
from spark_elastic.ops.process_sets import ProcessSet, global_process_set, root_index
from spark_elastic.ops.reduction import Average, ReduceOp
from spark_elastic.ops.rounds import negotiation as kinds
from spark_elastic.ops.rounds.negotiation import Request


def as_engine_array(array: Array) -> Array:
    """The same memory; bfloat16 looks like uint16."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def allreduce_arrays(
    arrays: Sequence[Array],
    name: str | None = None,
    op: ReduceOp = Average,
    scale: tuple[float, float] = (1.0, 1.0),
    process_set: ProcessSet = global_process_set,
) -> None:
    """Allreduce in place, as one operation."""
    request = Request(kinds.ALLREDUCE, name, _names(arrays), _shapes(arrays), op.value, scale)
    _execute(request, arrays, process_set)


def broadcast_arrays(
    arrays: Sequence[Array],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast in place, as one operation. root_rank: of the world."""
    root = root_index(process_set, root_rank)
    _execute(Request(kinds.BROADCAST, name, _names(arrays), _shapes(arrays), root=root), arrays, process_set)


def allgather_array(
    array: Array, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """All ranks' rows, in rank order."""
    request = Request(kinds.ALLGATHER, name, _names([array]), ((-1, *array.shape[1:]),))
    return _execute(request, [array], process_set)[0].view(array.dtype)


def reducescatter_array(
    array: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """This rank's rows of the reduced array."""
    request = Request(kinds.REDUCESCATTER, name, _names([array]), _shapes([array]), op.value)
    return _execute(request, [array], process_set)[0].view(array.dtype)


def _execute(request: Request, arrays: Sequence[Array], process_set: ProcessSet) -> tuple[Array, ...]:
    given = [as_engine_array(array) for array in arrays]
    return get_queue(process_set).submit(request, given, awaited=True).wait()


def _names(arrays: Sequence[Array]) -> tuple[str, ...]:
    return tuple(array.dtype.name for array in arrays)


def _shapes(arrays: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in arrays)
