"""The exchanges of a hand-written loop's gradients, step by step, over the groups of the process's current worker.

Every step takes the group anew, since groups change between worlds; a process that is no worker trains alone, and so
does one that is not in the process set. Training thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.timeline import get_timeline
from spark_elastic.protocol.types import START
from spark_elastic.torch.gradients.exchange import GradientExchange, weak_method
from spark_elastic.torch.gradients.exchange_options import ExchangeOptions
from spark_elastic.training.step_summary import StepDecision, StepSummary, exchange_summaries
from spark_elastic.worker.context import get_context, get_process_context
from spark_elastic.worker.session import get_engine, get_group

Marks = npt.NDArray[np.bool_]


class Joinable(Protocol):
    """What `join` needs of an optimizer that is in use."""

    def steps(self) -> int:
        """Exchanges of this rank's own gradients in the current world; 0 for one that trains alone.

        Raises:
            InvalidInput: there are gradients that were not exchanged.
        """
        ...

    def run_without_data(self) -> bool:
        """Take part in an exchange after this rank has joined. False once no rank has data any more.

        Raises:
            CollectiveError: the exchange broke.
        """
        ...


class GradientSync:
    """The exchanges of one optimizer. `done`: the present gradients have been exchanged."""

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        terms: ExchangeOptions,
        passes: int,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._passes = passes
        self._process_set = process_set
        self.exchange = GradientExchange(
            named, terms, weak_method(self._open), get_engine, get_timeline, _is_only_optimizer
        )
        self.done = False
        # In which the newest step was opened; in its process set there may be nobody but this rank.
        self._world: Group | None = None
        self._steps: tuple[Group | None, int] = (None, 0)  # exchanges in that group
        get_optimizers_in_use().add(self)

    def _open(self) -> None:
        """Open a step in the current world, if none is open. Called before a gradient counts."""
        if self.exchange.is_open and not self.is_stale():
            return
        if self.is_stale() and self.exchange.has_gradients:
            raise InvalidInput(
                "the world changed after backward(): call zero_grad() before the next backward()."
            )
        self._world = get_group()
        self.exchange.open(get_training_group(self._process_set), self._passes)
        self.done = False

    def set_backward_passes(self, passes: int) -> None:
        if passes < 1 or self.exchange.is_open:
            raise InvalidInput(
                "backward_passes_per_step must be at least 1, and can be set between steps only."
            )
        self._passes = passes

    def is_stale(self) -> bool:
        """Whether the open step belongs to a world that is over."""
        return self.exchange.is_open and self._world is not get_group()

    @property
    def has_unsynced_gradients(self) -> bool:
        """Whether gradients have come that no step has exchanged."""
        return self.exchange.is_open and self.exchange.has_gradients

    def clear(self) -> None:
        """Drop all gradients."""
        if self.exchange.is_open and not self.is_stale():
            raise InvalidInput(
                "zero_grad() was called between backward() and step(): call it after step(), or synchronize() first."
            )
        self.exchange.clear()
        self.done = False

    def run(self) -> None:
        """Exchange the present gradients.

        Raises:
            CollectiveError: the exchange broke; gradients are None, parameters and optimizer as they were.
            InvalidInput: another optimizer has to step first.
        """
        swap = self.exchange
        try:
            if self.is_stale():
                raise CollectiveError((), "the world changed between backward() and step()")
            self._open()
            self._check_order()
            there = np.array([parameter.grad is not None for parameter in swap.parameters])
            with world_ranks_in_errors(swap.group):
                swap.finish()
                present = self._trailer(swap.group, there) if swap.group is not None else there
        except CollectiveError:
            swap.clear()
            raise
        swap.drop_absent(present)
        self._steps = swap.group, self._steps_in(swap.group) + 1
        self.done = True

    def _check_order(self) -> None:
        """An optimizer that was alone when its backward ran has sent what was complete, which need not be the same on
        all ranks: nobody may come between that and the rest of it."""
        for other in get_optimizers_in_use():
            if (
                other is not self
                and isinstance(other, GradientSync)
                and other.exchange.is_partly_sent
                and not other.is_stale()
            ):
                raise InvalidInput(
                    "another DistributedOptimizer's gradients are on their way: call its step() first, or make all "
                    "optimizers before the first backward()."
                )

    def steps(self) -> int:
        """See `Joinable`."""
        group = get_training_group(self._process_set)
        if group is not None and group is self.exchange.group and self.has_unsynced_gradients:
            raise InvalidInput("join() was called between backward() and step(): call step() first.")
        return 0 if group is None else self._steps_in(group)

    def _steps_in(self, group: Group | None) -> int:
        return self._steps[1] if self._steps[0] is group else 0

    def close(self) -> None:
        """The optimizer is not in use any more."""
        get_optimizers_in_use().discard(self)
        self.exchange.close()

    def run_without_data(self) -> bool:
        """See `Joinable`."""
        group = get_training_group(self._process_set)
        if group is None or group.size == 1:
            return False
        self.exchange.begin(group, 0)
        try:
            with world_ranks_in_errors(group):
                self.exchange.finish()
                decision = self._exchange_trailer(
                    group, np.zeros(len(self.exchange.parameters), np.bool_), rows=0
                )
        finally:
            self.exchange.clear()
        return decision.rows > 0

    def _trailer(self, group: Group, there: Marks) -> Marks:
        return self._exchange_trailer(group, there, rows=1).present

    def _exchange_trailer(self, group: Group, there: Marks, rows: int) -> StepDecision:
        swap = self.exchange
        decision = exchange_trailer(
            group, swap.layout_hash, there, swap.sparse_parameters, swap.bucket_bytes, rows
        )
        swap.apply_agreement(decision.found_sparse, decision.bucket_bytes)
        return decision


class _OptimizersInUse(WeakSet[Joinable]):
    """The exchanges of all optimizers that this process uses."""


class _Subgroups(dict[tuple[int, ...], Group]):
    """The groups of process sets in one world, by their ranks."""


def get_optimizers_in_use() -> WeakSet[Joinable]:
    """The exchanges of all optimizers that this process uses."""
    return get_process_context().get_or_create(_OptimizersInUse)


def _is_only_optimizer() -> bool:
    """Whether one optimizer is in use, so that its buckets may go out during backward. With several, ranks may
    differ in which has a bucket complete first, but not in the order of their steps. An idle one only costs time."""
    return len(get_optimizers_in_use()) == 1


def get_training_group(process_set: ProcessSet) -> Group | None:
    """The group that trains together now; None: this process trains alone.

    Raises:
        CollectiveError: between two worlds there is nobody.
    """
    worker = get_context()
    if worker is None or process_set is global_process_set:
        return None if worker is None else worker.require_group()
    ranks, world = tuple(process_set.ranks), worker.require_group()
    if world.rank not in ranks or len(ranks) == 1:
        return None
    subgroups = worker.group_context.get_or_create(_Subgroups)
    if ranks not in subgroups:
        subgroups[ranks] = worker.wait_recorder.watch_group(world.subgroup(_number(ranks), ranks))
    return subgroups[ranks]


@contextmanager
def world_ranks_in_errors(group: Group | None) -> Iterator[None]:
    """Whoever is at fault in a process set's exchange is known to the driver by the world's ranks."""
    try:
        yield
    except CollectiveError as error:
        raise error if group is None else error.among(group.members) from error.__cause__


def exchange_trailer(
    group: Group, layout: int, present: Marks, found_sparse: Marks, bucket_bytes: int, rows: int = 1
) -> StepDecision:
    """Exchange the trailer of a step in the current world, by which it also hears of planned changes (R6).

    rows: 0 on a rank that has joined.
    """
    worker = get_context()
    version = 0 if worker is None or worker.handle is None else worker.handle.membership_version()
    mine = StepSummary(START, version, layout, rows, 0.0, 1.0, present, found_sparse, bucket_bytes)
    decision = exchange_summaries(group, mine)
    if worker is not None and worker.group is group:  # what a part of the world heard is no agreement of all
        worker.group_context.record_agreed_version(decision.version)
    return decision


def _number(ranks: tuple[int, ...]) -> int:
    """The number of the subgroup's channel: the same on all members, and no other channel's."""
    return 1 + int.from_bytes(hashlib.sha256(f"gradients {ranks}".encode()).digest()[:7], "little")
