"""Operations in the current world: what frameworks' façades call. Makes the channels of a world as they are asked for.

A channel lives as long as the world's group; its subgroup ends with that. Any thread.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group
from elastic_collectives.group import Array
from spark_elastic.clock import SystemClock
from spark_elastic.config import OperationConfig, operations_from_env
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.negotiation import ALLGATHER, ALLREDUCE, BARRIER, BROADCAST, REDUCESCATTER, Request
from spark_elastic.ops.operation import CompletionSignal
from spark_elastic.ops.operation_queue import OperationQueue
from spark_elastic.ops.process_sets import ProcessSet, global_process_set, root_index, world
from spark_elastic.ops.reduction import Average, ReduceOp
from spark_elastic.ops.timeline import Timeline
from spark_elastic.state.handover import pickled
from spark_elastic.worker.context import get_context, get_group_context, get_process_context

log = logging.getLogger(__name__)


class OperationQueues:
    """The channels of one world, one for each process set. Names of operations belong to the set."""

    def __init__(self, group: Group, desk: Callable[[], CompletionSignal], limits: OperationConfig) -> None:
        self._group = group
        self._desk = desk
        self._limits = limits
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, ...], OperationQueue] = {}

    def get(self, process_set: ProcessSet, timeline: Timeline | None = None) -> OperationQueue:
        """The channel of a set that the current rank is in."""
        with self._lock:
            rule = process_set.declared_ranks
            if rule not in self._channels:
                group = self._group
                if group.size > 1:
                    group = group.subgroup(_subgroup_channel(rule), process_set.ranks)
                name = "" if process_set is global_process_set else repr(process_set)
                self._channels[rule] = OperationQueue(group, self._desk(), self._limits, name)
            channel = self._channels[rule]
        channel.timeline = timeline
        return channel


def _subgroup_channel(rule: tuple[int, ...]) -> int:
    """Of the subgroup's channel: the same on all members, in whatever order they added their sets."""
    return 1 + int.from_bytes(hashlib.sha256(repr(rule).encode()).digest()[:7], "little")


def get_queue(process_set: ProcessSet = global_process_set) -> OperationQueue:
    """Where operations of that set are submitted in the current world.

    Raises:
        InvalidInput: it is no set, was not added, or this rank is not in it.
        CollectiveError: there is no world at present.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidInput(f"process_set must be a ProcessSet; got {type(process_set).__name__}.")
    if process_set.process_set_id is None:
        raise InvalidInput(f"{process_set} is not usable yet: add_process_set() first, on all ranks.")
    group = world()
    if group.rank not in process_set.ranks:
        raise InvalidInput(f"rank {group.rank} is not in {process_set}: let its members alone call this.")
    channels = get_group_context().get_or_create(
        OperationQueues, lambda: OperationQueues(group, _make_completion_signal, operations_from_env())
    )
    return channels.get(process_set, get_timeline())


def _make_completion_signal() -> CompletionSignal:
    worker = get_context()
    wait = nullcontext if worker is None else worker.wait_recorder.record_wait
    return CompletionSignal(SystemClock(), wait)


@dataclass
class _TimelineState:
    """The timeline that was asked for on every rank. Only rank 0 has its file open."""

    path: str | None = None
    mark_cycles: bool = False
    timeline: Timeline | None = None

    def current(self) -> Timeline | None:
        """A rank that has become the first one of its world continues the file of the rank before it, if it can."""
        if self.path is not None and self.timeline is None and world().rank == 0:
            goes_on = world().fence[1] > 1
            try:
                self.timeline = Timeline(self.path, self.mark_cycles, goes_on)
            except InvalidInput as error:
                if not goes_on:
                    raise
                log.warning("%s It ends here; training goes on.", error)
                self.path = None
        return self.timeline


def _get_timeline_state() -> _TimelineState:
    return get_process_context().get_or_create(_TimelineState, _timeline_from_env)


def _timeline_from_env() -> _TimelineState:
    settings = operations_from_env()
    return _TimelineState(settings.timeline, settings.timeline_mark_cycles)


def get_timeline() -> Timeline | None:
    """The timeline that this rank writes now; None if it writes none."""
    return _get_timeline_state().current()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin a Chrome trace of all operations; the rank that is 0 writes it, on its host. To be called on all ranks.

    If it already writes to that path, it goes on: the function may have been run again in another world.

    Raises:
        InvalidInput: another one is being written already, or the file cannot be.
    """
    trace = _get_timeline_state()
    if trace.path == file_path:
        return
    if trace.path is not None:
        raise InvalidInput("a timeline is being written: stop_timeline() first.")
    if world().rank == 0:
        trace.timeline = Timeline(file_path, mark_cycles)
    trace.path, trace.mark_cycles = file_path, mark_cycles


def stop_timeline() -> None:
    """Complete the trace."""
    trace = _get_timeline_state()
    if trace.timeline is not None:
        trace.timeline.close()
    trace.path = trace.timeline = None


# `barrier` under Horovod's name. Any thread.


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the set have called it."""
    get_queue(process_set).submit(Request(BARRIER), awaited=True).wait()


# Operations on numpy arrays, for what needs no tensor of a framework. Any thread; all return when they are done.
#
# Arrays are contiguous. bfloat16, a dtype that only the package ml_dtypes gives numpy, is accepted.


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
    request = Request(ALLREDUCE, name, _names(arrays), _shapes(arrays), op.value, scale)
    _execute(request, arrays, process_set)


def broadcast_arrays(
    arrays: Sequence[Array],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast in place, as one operation. root_rank: of the world."""
    root = root_index(process_set, root_rank)
    _execute(Request(BROADCAST, name, _names(arrays), _shapes(arrays), root=root), arrays, process_set)


def allgather_array(
    array: Array, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """All ranks' rows, in rank order."""
    request = Request(ALLGATHER, name, _names([array]), ((-1, *array.shape[1:]),))
    return _execute(request, [array], process_set)[0].view(array.dtype)


def reducescatter_array(
    array: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """This rank's rows of the reduced array."""
    request = Request(REDUCESCATTER, name, _names([array]), _shapes([array]), op.value)
    return _execute(request, [array], process_set)[0].view(array.dtype)


def _execute(request: Request, arrays: Sequence[Array], process_set: ProcessSet) -> tuple[Array, ...]:
    given = [as_engine_array(array) for array in arrays]
    return get_queue(process_set).submit(request, given, awaited=True).wait()


def _names(arrays: Sequence[Array]) -> tuple[str, ...]:
    return tuple(array.dtype.name for array in arrays)


def _shapes(arrays: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in arrays)


# Objects from one rank to the others, under Horovod's names. Training thread only.
#
# They are pickled: they come from peers of the mesh, which have proved that they hold the job's key.

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
