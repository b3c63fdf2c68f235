"""The gradients of a hand-written loop, synchronized step by step over the groups of the current worker.

Every step takes the group anew, since groups change between worlds. A process that is no worker trains alone, and so
does one that is not in the process set. The training thread owns everything here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.buckets import hash_layout
from spark_elastic.gradients.exchange import GradientExchange, disable_compile, make_weak_method
from spark_elastic.gradients.host_memory import array_of, get_dtype_name
from spark_elastic.gradients.layout import build_specs, find_trainable
from spark_elastic.gradients.process_sets import ALL, ProcessSet, choose_channel
from spark_elastic.gradients.reduction import ExchangeOptions
from spark_elastic.gradients.step_summary import Flags, StepDecision, StepSummary, exchange_summaries
from spark_elastic.gradients.timeline import get_timeline
from spark_elastic.protocol.types import INITIAL_VERSION, START
from spark_elastic.worker.context import get_context, get_process_context
from spark_elastic.worker.session import get_collective_thread, get_group

NamedParameters: TypeAlias = list[tuple[str, torch.nn.Parameter]]


class OptimizerSync(ABC):
    """The exchanges of one optimizer that is in use. `join` takes part in those of other ranks."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._counted: tuple[Group | None, int] = (None, 0)  # a group, and the exchanges in it
        get_optimizers_in_use().add(self)

    def close(self) -> None:
        get_optimizers_in_use().discard(self)

    def count_step(self, group: Group | None) -> None:
        self._counted = group, 1 + (self._counted[1] if self._counted[0] is group else 0)

    def steps(self) -> int:
        """Return the exchanges of this rank's own gradients in the current world; 0 if it trains alone. Raises
        InvalidInput if this rank has gradients that were not exchanged."""
        group = get_training_group(self._process_set)
        return self._counted[1] if group is not None and self._counted[0] is group else 0

    def run_without_data(self) -> bool:
        """Take part in an exchange after this rank has joined. Returns False once no rank has data any more. Raises
        CollectiveError if the exchange broke."""
        group = get_training_group(self._process_set)
        if group is None or group.size == 1:
            return False
        with translate_ranks_in_errors(group):
            return self._exchange_nothing(group).rows > 0

    @abstractmethod
    def _exchange_nothing(self, group: Group) -> StepDecision:
        """Exchange what changes nothing of the others' sums."""


class GradientSync(OptimizerSync):
    def __init__(
        self, named: NamedParameters, options: ExchangeOptions, passes: int, process_set: ProcessSet = ALL
    ) -> None:
        self._passes = passes
        before = make_weak_method(self._check_in_share if options.shares else self._open)
        self.exchange = GradientExchange(
            named, options, before, get_collective_thread, get_timeline, _is_only_optimizer
        )
        self._has_shares = options.shares > 0
        self.is_synchronized = False  # the present gradients are those of all ranks
        # The world's group in the newest step, even if the process set has this rank only.
        self._world_group: Group | None = None
        super().__init__(process_set)

    def _open(self) -> None:
        """Open a step in the current world, if none is open. Called before a gradient counts."""
        if self.exchange.mode.has_open_step and not self.is_stale():
            return
        if self.is_stale() and self.exchange.mode.has_gradients:
            raise InvalidInput(
                "the world changed after backward(): call zero_grad() before the next backward()."
            )
        self._world_group = get_group()
        self.exchange.begin_with_gradients(get_training_group(self._process_set), self._passes)
        self.is_synchronized = False

    def begin_share(self) -> None:
        """The backward passes that follow belong to this rank's next virtual share."""
        if not self.exchange.mode.has_open_step and any(p.grad is not None for p in self.exchange.parameters):
            raise InvalidInput(
                "there are gradients before the first virtual share of a step: call optimizer.zero_grad() first."
            )
        self._open()
        self.exchange.begin_share()

    def end_share(self) -> None:
        """End the virtual share: the backward passes since `begin_share` were all of it."""
        self.exchange.end_share()

    def _check_in_share(self) -> None:
        if not self.exchange.mode.in_share or self.is_stale():
            raise InvalidInput(
                "backward() was called outside of a virtual share: with determinism='bitwise' call it for each batch "
                "of `for batch in shares`, where `shares` is what the ElasticDataLoader yields."
            )

    def set_backward_passes(self, passes: int) -> None:
        if passes < 1 or self.exchange.mode.has_open_step:
            raise InvalidInput(
                "backward_passes_per_step must be at least 1, and can be set between steps only."
            )
        self._passes = passes

    def is_stale(self) -> bool:
        """Whether the open step belongs to a world that is over."""
        return self.exchange.mode.has_open_step and self._world_group is not get_group()

    @property
    def has_unsynced_gradients(self) -> bool:
        return self.exchange.mode.has_open_step and self.exchange.mode.has_gradients

    def clear(self) -> None:
        if self.exchange.mode.has_open_step and not self.is_stale():
            raise InvalidInput(
                "zero_grad() was called between backward() and step(): call it after step(), or synchronize() first. "
                "If another optimizer's loss left these gradients, as in a GAN, call requires_grad_(False) on their "
                "parameters before its backward()."
            )
        self.exchange.clear()
        self.is_synchronized = False

    def synchronize(self) -> None:
        """Replace the present gradients by those of all ranks.

        Raises:
            CollectiveError: the exchange broke; gradients are None, parameters and optimizer as they were.
            InvalidInput: another optimizer must step first.
        """
        exchange = self.exchange
        try:
            if self.is_stale():
                raise CollectiveError((), "the world changed between backward() and step()")
            self._open()
            self._check_order()
            if self._has_shares:
                present = exchange.mode.present
            else:
                present = np.array([parameter.grad is not None for parameter in exchange.parameters])
            with translate_ranks_in_errors(exchange.group):
                exchange.finish()
                if exchange.group is not None:
                    present = self._exchange_summary(exchange.group, present, rows=1).present
        except CollectiveError:
            exchange.clear()
            raise
        exchange.drop_absent(present)
        self.count_step(exchange.group)
        self.is_synchronized = True

    def _check_order(self) -> None:
        """Check that no other optimizer is between the first and the last of its buckets: the ranks need not have
        launched the same ones of them, so another exchange in between would meet different collectives."""
        for other in get_optimizers_in_use():
            if other is self or not isinstance(other, GradientSync):
                continue
            if other.exchange.mode.has_launched_buckets and not other.is_stale():
                raise InvalidInput(
                    "another DistributedOptimizer's gradients are on their way: call its step() first, or make all "
                    "optimizers before the first backward()."
                )

    def steps(self) -> int:
        group = get_training_group(self._process_set)
        if group is not None and group is self.exchange.group and self.has_unsynced_gradients:
            raise InvalidInput("join() was called between backward() and step(): call step() first.")
        return super().steps()

    def close(self) -> None:
        super().close()
        self.exchange.close()

    def _exchange_nothing(self, group: Group) -> StepDecision:
        self.exchange.clear_and_begin(group, 0)
        try:
            self.exchange.finish()
            return self._exchange_summary(group, np.zeros(len(self.exchange.parameters), np.bool_), rows=0)
        finally:
            self.exchange.clear()

    def _exchange_summary(self, group: Group, present: Flags, rows: int) -> StepDecision:
        mode = self.exchange.mode
        decision = exchange_summary(group, mode.layout.hash, present, mode.found_sparse, rows)
        self.exchange.adopt_sparse_parameters(decision.found_sparse)
        return decision


class _OptimizersInUse(WeakSet[OptimizerSync]):
    """The exchanges of all optimizers that this process uses."""


class _Subgroups(dict[tuple[int, ...], Group]):
    """The groups of process sets in one world, by their ranks."""


def get_optimizers_in_use() -> WeakSet[OptimizerSync]:
    return get_process_context().get_or_create(_OptimizersInUse)


def _is_only_optimizer() -> bool:
    """Whether one optimizer is in use, so that its buckets may be launched during backward. With several, the ranks may
    differ in which optimizer completes a bucket first, but not in the order of their steps. Two optimizers over the
    halves of a net of 25 M parameters took 0 to 15 % more time for a step on two processes."""
    return len(get_optimizers_in_use()) == 1


def get_training_group(process_set: ProcessSet) -> Group | None:
    """Return the group that trains together now; None: this process trains alone. Raises CollectiveError if the worker
    is between two worlds."""
    worker = get_context()
    if worker is None or process_set is ALL:
        return None if worker is None else worker.require_group()
    ranks, world_group = tuple(process_set.ranks), worker.require_group()
    if world_group.rank not in ranks or len(ranks) == 1:
        return None
    subgroups = worker.group_context.get_or_create(_Subgroups)
    if ranks not in subgroups:
        subgroup = world_group.subgroup(choose_channel("gradients", ranks), ranks)
        subgroups[ranks] = worker.wait_recorder.watch_group(subgroup)
    return subgroups[ranks]


@contextmanager
def translate_ranks_in_errors(group: Group | None) -> Iterator[None]:
    """Translate the ranks in a CollectiveError of a process set to ranks of the world, which the driver knows."""
    try:
        yield
    except CollectiveError as error:
        raise error if group is None else error.to_world_ranks(group.members) from error.__cause__


def exchange_summary(
    group: Group, layout: int, present: Flags, found_sparse: Flags, rows: int = 1
) -> StepDecision:
    """Exchange the summary of a step, by which the ranks also agree on planned changes of the world (R6, step summary).
    rows: 0 on a rank that has joined."""
    worker = get_context()
    handle = None if worker is None else worker.handle
    version = INITIAL_VERSION if handle is None else handle.membership_version()
    mine = StepSummary(START, version, layout, rows, 0.0, 1.0, present, found_sparse)
    decision = exchange_summaries(group, mine)
    if worker is not None and worker.group is group:  # a process set cannot agree for the whole world
        worker.group_context.record_agreed_version(decision.version)
    return decision


class AdasumSync(OptimizerSync):
    """Combines the steps of all ranks. Each parameter's change is combined with those of the other ranks by the angle
    between them (Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021). The optimizer's
    state is each rank's own."""

    def __init__(self, named: NamedParameters, process_set: ProcessSet) -> None:
        trainable = find_trainable(named)
        self._parameters = list(trainable.values())
        self._frozen = [(name, parameter) for name, parameter in named if name not in trainable]
        self._layout = hash_layout(build_specs(list(trainable), self._parameters), ())
        super().__init__(process_set)

    def _exchange_nothing(self, group: Group) -> StepDecision:
        """Zeros leave the combined step of the others as it is; this rank does not apply it."""
        with torch.no_grad():
            for parameter in self._parameters:
                _allreduce_adasum(group, torch.zeros_like(parameter))
            return self._exchange_summary(group, rows=0)

    def combine_step(self, apply: Callable[[], Any]) -> Any:
        """Call `apply`, which changes the parameters, and replace the change by that of all ranks.

        Raises:
            CollectiveError: the exchange broke; the parameters are as before, the optimizer's state is one step ahead.
            InvalidInput: a parameter was frozen when training began, and is not now; nothing has changed.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InvalidInput(
                    f"parameter {name!r} was frozen when training began, and op=Adasum combines the others only: let "
                    "it require a gradient from the start."
                )
        group = get_training_group(self._process_set)
        before = [parameter.detach().clone() for parameter in self._parameters]
        value = apply()
        if group is None:
            return value
        try:
            with torch.no_grad(), translate_ranks_in_errors(group):
                self._combine(group, before)
        except CollectiveError:
            with torch.no_grad():
                for parameter, was in zip(self._parameters, before, strict=True):
                    parameter.copy_(was)
            raise
        return value

    @disable_compile
    def _combine(self, group: Group, before: list[torch.Tensor]) -> None:
        thread = get_collective_thread()
        if thread is not None:
            thread.drain()
        for parameter, was in zip(self._parameters, before, strict=True):
            change = _allreduce_adasum(group, parameter - was)
            parameter.copy_(was + change.to(was.device))
        self._exchange_summary(group, rows=1)
        self.count_step(group)

    def _exchange_summary(self, group: Group, rows: int) -> StepDecision:
        everything = np.ones(len(self._parameters), np.bool_)
        return exchange_summary(group, self._layout, everything, ~everything, rows)


def _allreduce_adasum(group: Group, change: torch.Tensor) -> torch.Tensor:
    host = change.cpu().contiguous()
    group.allreduce(array_of(host), op="adasum", dtype=get_dtype_name(host.dtype))
    return host
