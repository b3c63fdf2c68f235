"""Operations in the current world: what frameworks' façades call. Makes the channels of a world as they are asked for.

A channel lives as long as the world's group; its subgroup ends with that. Any thread.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic_collectives import Group
from spark_elastic.clock import SystemClock
from spark_elastic.config import OperationConfig, operations_from_env
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.rounds import negotiation as kinds
from spark_elastic.ops.rounds.channel import OperationQueue
from spark_elastic.ops.rounds.execution import CompletionSignal
from spark_elastic.ops.rounds.negotiation import Request
from spark_elastic.ops.timeline import Timeline
from spark_elastic.ops.world import world
from spark_elastic.worker.context import current, floor_of_process

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
    here = current()
    floor = floor_of_process() if here is None else here.floor
    group = world()
    if group.rank not in process_set.ranks:
        raise InvalidInput(f"rank {group.rank} is not in {process_set}: let its members alone call this.")
    channels = floor.shared(
        "channels", lambda: OperationQueues(group, _make_completion_signal, operations_from_env())
    )
    return channels.get(process_set, get_timeline())


def _make_completion_signal() -> CompletionSignal:
    here = current()
    return CompletionSignal(SystemClock()) if here is None else CompletionSignal(SystemClock(), here.waiting)


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
    return floor_of_process().shared("timeline", _timeline_from_env)


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
    get_queue(process_set).submit(Request(kinds.BARRIER), awaited=True).wait()
