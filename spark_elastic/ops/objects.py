"""Objects from one rank to the others, under Horovod's names. Training thread only.

They are pickled: they come from peers of the mesh, which have proved that they hold the job's key.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from elastic_collectives.group import Array
from spark_elastic.ops.arrays import allgather_array, broadcast_arrays
from spark_elastic.ops.process_sets import ProcessSet, global_process_set, root_index
from spark_elastic.state.handover import pickled

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The object of rank `root_rank`, on all ranks."""
    if process_set.size() == 1:
        return obj
    is_root = process_set.rank() == root_index(process_set, root_rank)
    mine = _bytes_of(obj) if is_root else np.empty(0, np.uint8)
    name = name or "object"
    length = np.array([len(mine)], np.int64)
    broadcast_arrays([length], root_rank, f"broadcast.{name}.length", process_set)
    data = mine if is_root else np.empty(int(length[0]), np.uint8)
    broadcast_arrays([data], root_rank, f"broadcast.{name}.data", process_set)
    return obj if is_root else _object_of(data)


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """All ranks' objects, in rank order."""
    mine, name = _bytes_of(obj), name or "object"
    lengths = allgather_array(np.array([len(mine)], np.int64), f"allgather.{name}.length", process_set)
    data = allgather_array(mine, f"allgather.{name}.data", process_set)
    return [_object_of(part) for part in np.split(data, np.cumsum(lengths)[:-1])]


def _bytes_of(obj: object) -> Bytes:
    return np.frombuffer(bytearray(pickled(obj)), np.uint8)


def _object_of(data: Array) -> Any:
    return pickle.loads(data.tobytes())
