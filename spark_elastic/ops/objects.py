"""Objects from one rank to the others, under Horovod's names. Training thread only.

They are pickled: they come from peers of the mesh, which have proved that they hold the job's key.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from elastic_collectives.group import Array
from spark_elastic.ops import request as kinds
from spark_elastic.ops.channels import channel_of
from spark_elastic.ops.process_sets import ProcessSet, global_process_set, root_in
from spark_elastic.ops.request import Request
from spark_elastic.state.handover import pickled

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of rank `root_rank`, on all ranks."""
    if process_set.size() == 1:
        return obj
    root = root_in(process_set, root_rank)
    is_root = process_set.rank() == root
    mine = _bytes_of(obj) if is_root else np.empty(0, np.uint8)
    name = name or "object"
    length = np.array([len(mine)], np.int64)
    _broadcast(length, root, f"{name}.length", process_set)
    data = mine if is_root else np.empty(int(length[0]), np.uint8)
    _broadcast(data, root, f"{name}.data", process_set)
    return obj if is_root else _object_of(data)


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """All ranks' objects, in rank order."""
    mine, name = _bytes_of(obj), name or "object"
    lengths = _gathered(np.array([len(mine)], np.int64), f"{name}.length", process_set)
    data = _gathered(mine, f"{name}.data", process_set)
    return [_object_of(part) for part in np.split(data, np.cumsum(lengths)[:-1])]


def _broadcast(array: Array, root: int, name: str, process_set: ProcessSet) -> None:
    request = Request(kinds.BROADCAST, f"broadcast.{name}", (array.dtype.name,), (array.shape,), root=root)
    channel_of(process_set).submit(request, [array], awaited=True).wait()


def _gathered(array: Array, name: str, process_set: ProcessSet) -> Array:
    request = Request(kinds.ALLGATHER, f"allgather.{name}", (array.dtype.name,), ((-1,),))
    return channel_of(process_set).submit(request, [array], awaited=True).wait()[0]


def _bytes_of(obj: object) -> Bytes:
    return np.frombuffer(bytearray(pickled(obj)), np.uint8)


def _object_of(data: Array) -> Any:
    return pickle.loads(data.tobytes())
