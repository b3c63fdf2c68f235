"""`DistributedOptimizer` for hand-written loops: any torch optimizer whose gradients are exchanged before each step.

Bucketed exchanges overlap backward; `rounds` has what a step is made of. Training thread only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn, SupportsIndex, TypeVar

import numpy as np
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.distributed_optimizer import validate_backward_passes
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduction import Adasum, Average, Compressor, NoneCompressor, ReduceOp, ReduceOptions
from spark_elastic.torch.gradients.buckets import even_groups, layout_hash
from spark_elastic.torch.gradients.exchange_options import build_specs, find_trainable, options_from_env
from spark_elastic.torch.gradients.gradient_sync import (
    GradientSync,
    exchange_trailer,
    get_optimizers_in_use,
    get_training_group,
    world_ranks_in_errors,
)
from spark_elastic.torch.optimizers import multiply_rates
from spark_elastic.torch.tensors import disable_compile
from spark_elastic.training.step_summary import StepDecision
from spark_elastic.worker.context import get_context
from spark_elastic.worker.session import get_engine

# An optimizer's parameters under the names that the user gave them. Looks only.


def name_parameters(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters with their names, in the order of the names given."""
    mine = [
        (f"{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]
    if named is None:
        return mine
    pairs: list[Any] = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise InvalidInput(
            "named_parameters must be pairs of name and parameter, as model.named_parameters() gives."
        )
    for what, keys in (("name", [name for name, _ in pairs]), ("parameter", [id(p) for _, p in pairs])):
        times = Counter(keys)
        twice = sorted({pair[0] for pair, key in zip(pairs, keys, strict=True) if times[key] > 1})
        if twice:
            raise InvalidInput(f"named_parameters holds a {what} twice: {', '.join(twice)}; give each once.")
    names = {id(parameter) for _, parameter in pairs}
    unnamed = [place for place, parameter in mine if id(parameter) not in names and parameter.requires_grad]
    if unnamed:
        raise InvalidInput(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters (group.number {unnamed[0]} first): "
            "pass the named_parameters() of every module that it trains, or leave the argument out."
        )
    held = {id(parameter) for _, parameter in mine}
    return [(name, parameter) for name, parameter in pairs if id(parameter) in held]


# What every `DistributedOptimizer` refuses, by whatever it exchanges.


class DistributedBase(torch.optim.Optimizer):
    """The first of the classes that are added to the optimizer's own. Never instantiated by itself."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise InvalidInput("DistributedOptimizer takes no further parameters: add the group before wrapping.")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidInput(
            "a DistributedOptimizer cannot be copied or pickled, since its exchange belongs to this process: take its "
            "state_dict(), and wrap the other optimizer itself."
        )


# `DistributedOptimizer` with op=Adasum: every rank takes a step of its own, and the steps are combined.
#
# Each parameter's change is combined with the other ranks' by the angle between them (Maleki et al., "Scaling
# distributed training with adaptive summation", MLSys 2021). The optimizer's state is each rank's own. Training thread
# only.


class AdasumSync:
    """What each step changed, combined over the ranks."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], process_set: ProcessSet) -> None:
        names, self._parameters, _ = find_trainable(named)
        self._layout = layout_hash(build_specs(names, self._parameters), ())
        self._process_set = process_set
        self._steps: tuple[Group | None, int] = (None, 0)  # in that group
        get_optimizers_in_use().add(self)

    def close(self) -> None:
        """The optimizer is not in use any more."""
        get_optimizers_in_use().discard(self)

    def steps(self) -> int:
        """See `Joinable`."""
        group = get_training_group(self._process_set)
        return self._steps[1] if group is not None and self._steps[0] is group else 0

    def run_without_data(self) -> bool:
        """See `Joinable`. Nothing added leaves the others' combined step as it is; here it is not applied."""
        group = get_training_group(self._process_set)
        if group is None or group.size == 1:
            return False
        with torch.no_grad(), world_ranks_in_errors(group):
            for parameter in self._parameters:
                _allreduce_adasum(group, torch.zeros_like(parameter))
            return self._exchange_trailer(group, rows=0).rows > 0

    def combine_step(self, apply: Callable[[], Any]) -> Any:
        """`apply` changes the parameters; then they hold what they were plus the combined change.

        Raises:
            CollectiveError: the exchange broke; parameters are as they were, the optimizer's state is a step ahead.
        """
        group = get_training_group(self._process_set)
        before = [parameter.detach().clone() for parameter in self._parameters]
        value = apply()
        if group is None:
            return value
        try:
            with torch.no_grad(), world_ranks_in_errors(group):
                self._combine(group, before)
        except CollectiveError:
            with torch.no_grad():
                for parameter, was in zip(self._parameters, before, strict=True):
                    parameter.copy_(was)
            raise
        return value

    @disable_compile
    def _combine(self, group: Group, before: list[torch.Tensor]) -> None:
        engine = get_engine()
        if engine is not None:
            engine.drain()
        for parameter, was in zip(self._parameters, before, strict=True):
            change = _allreduce_adasum(group, parameter - was)
            parameter.copy_(was + change.to(was.device))
        self._exchange_trailer(group, rows=1)
        self._steps = group, 1 + (self._steps[1] if self._steps[0] is group else 0)

    def _exchange_trailer(self, group: Group, rows: int) -> StepDecision:
        everything = np.ones(len(self._parameters), np.bool_)
        return exchange_trailer(group, self._layout, everything, ~everything, rows)


def _allreduce_adasum(group: Group, change: torch.Tensor) -> torch.Tensor:
    host = change.cpu().contiguous()
    flat = host.view(torch.uint16) if host.dtype == torch.bfloat16 else host
    group.allreduce(flat.numpy(), op="adasum", dtype=str(host.dtype).removeprefix("torch."))
    return host


class AdasumOptimizer(DistributedBase):
    """What is added to the optimizer's own class. Never instantiated by itself."""

    _deltas: AdasumSync

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients and combine with the other ranks' steps. closure: computes gradients.

        Raises:
            CollectiveError: see `Deltas.around`; a state that was committed before puts the optimizer back, too.
        """
        self._opt_called = True  # what a scheduler made before the wrapping looks for
        plain = super().step
        return self._deltas.combine_step(plain if closure is None else lambda: plain(closure))

    step.hooked = True  # type: ignore[attr-defined] # torch then leaves the profiling hooks to the own class's step

    def synchronize(self) -> None:
        """Nothing: gradients are each rank's own."""

    def skip_synchronize(self) -> None:
        raise InvalidInput(
            "skip_synchronize() has no meaning with op=Adasum, which exchanges in step() alone."
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: gradients add up until `step`."""

    def close(self) -> None:
        """For processes that outlive their training: `join` goes by another optimizer's steps then."""
        self._deltas.close()


log = logging.getLogger(__name__)

Plain = TypeVar("Plain", bound=torch.optim.Optimizer)
Groups = Sequence[Sequence[torch.nn.Parameter]]


def DistributedOptimizer(  # noqa: PLR0913 - name and arguments are Horovod's
    optimizer: Plain,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: object = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_lr: bool = False,
) -> Plain:
    """`optimizer` with exchanged gradients: of the same class, over the same state and parameter groups.

    The gradients of `backward_passes_per_step` backward passes are summed, then summed over the ranks and, for
    Average, divided by their number. Adasum: see `adasum`. compression: how float32 travels, or a `Compressor` of your
    own, which is given each gradient that has all its rows, on the host, in any thread. gradient_predivide_factor: f
    divides by f before and by size / f after. groups: parameters that travel together, as lists or as a number of
    groups to make (num_groups: the same). sparse_as_dense: gradients with rows missing become dense. process_set: who
    exchanges; other ranks train alone. scale_lr: the rates are multiplied by the set's size at this moment, and never
    again, whatever the world does; a newcomer is given the rates of the others with their state.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if isinstance(optimizer, torch.optim.LBFGS | DistributedBase):
        raise InvalidInput(
            f"DistributedOptimizer wraps a plain optimizer once, and never LBFGS; got {type(optimizer).__name__}."
        )
    how = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)
    passes = validate_backward_passes(backward_passes_per_step)
    named = name_parameters(optimizer, named_parameters)
    terms = options_from_env(
        groups=_find_groups(named, groups if groups is not None else num_groups),
        average=op is Average,
        predivide=gradient_predivide_factor,
        wire=how.compression.wire,
        compressor=_find_custom_compressor(how.compression),
        sparse="dense" if sparse_as_dense else "kept",
    )
    if op is Adasum and (terms.wire is not None or terms.compressor is not None or terms.groups):
        raise InvalidInput("op=Adasum combines each parameter by itself: leave compression and groups out.")
    added: type = AdasumOptimizer if op is Adasum else _Distributed
    distributed: Any = object.__new__(type(type(optimizer).__name__, (added, type(optimizer)), {}))
    distributed.__dict__ = optimizer.__dict__  # one state: what holds the plain optimizer sees the same
    if op is Adasum:
        distributed._deltas = AdasumSync(named, process_set)
    else:
        distributed._sync = GradientSync(named, terms, passes, process_set)
    worker = get_context()
    if scale_lr:
        multiply_rates(optimizer, process_set.size() if process_set.included() else 1)
    elif worker is not None and worker.group is not None and worker.group.size > 1 and worker.group.rank == 0:
        _warn_unscaled_rate()
    _rebind_step(distributed)
    wrapped: Plain = distributed
    return wrapped


@lru_cache(maxsize=1)
def _warn_unscaled_rate() -> None:
    """Once in a process."""
    log.warning(
        "DistributedOptimizer takes the learning rate as it is and does not multiply it by the world's size: "
        "scale_lr=True does, once."
    )


def _find_custom_compressor(kind: type[Compressor]) -> type[Compressor] | None:
    """The compressor, if it is one that the engine does not know."""
    plain = (kind.compress, kind.decompress) == (NoneCompressor.compress, NoneCompressor.decompress)
    return None if plain or kind.wire is not None else kind


def _find_groups(
    named: list[tuple[str, torch.nn.Parameter]], wanted: int | Groups
) -> tuple[tuple[int, ...], ...]:
    """Numbers among the parameters that train."""
    numbers = {id(p): i for i, p in enumerate(p for _, p in named if p.requires_grad)}
    if isinstance(wanted, int):
        if wanted < 0:
            raise InvalidInput(f"groups must be lists of parameters, or a number of 1 or more; got {wanted}.")
        return even_groups(len(numbers), wanted) if wanted else ()
    listed = [id(parameter) for group in wanted for parameter in group]
    if len(set(listed)) < len(listed) or not set(listed) <= numbers.keys():
        raise InvalidInput(
            "groups must hold parameters that the optimizer trains, each in one group at most."
        )
    return tuple(tuple(sorted(numbers[id(p)] for p in group)) for group in wanted if group)


class _Distributed(DistributedBase):
    """What is added to the optimizer's own class. Never instantiated by itself."""

    _sync: GradientSync
    _skips: bool = False

    @disable_compile
    def synchronize(self) -> None:
        """Wait until the gradients hold the average or sum over all ranks; for clipping before `step`.

        Raises:
            CollectiveError: the exchange broke; gradients are None, parameters and optimizer as they were.
        """
        self._sync.run()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not exchange gradients."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, unless `synchronize` was called since the last gradient, and apply. closure: computes gradients.

        Raises:
            CollectiveError: as `synchronize`.
        """
        self._opt_called = True  # what a scheduler made before the wrapping looks for
        if closure is not None:
            return super().step(lambda: self._compute_and_exchange(closure))
        self._exchange_once()
        return super().step()

    step.hooked = True  # type: ignore[attr-defined] # torch then leaves the profiling hooks to the own class's step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's name. A `GradScaler` asks in its `step`, whatever it found on this rank; what it does to gradients
        leaves no other trace."""
        exchange = self._sync.exchange
        if exchange.is_open and exchange.group is not None and exchange.group.size > 1:
            raise exchange.reject_changed_gradients()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients become None, whatever `set_to_none` says: one that no rank computes is None after `step`, too."""
        self._sync.clear()
        mine = set(self._sync.exchange.parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in mine:
                    parameter.grad = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._sync.set_backward_passes(passes)

    def close(self) -> None:
        """End the engine thread and let go of the gradients; for processes that outlive their training."""
        self._sync.close()

    def _compute_and_exchange(self, closure: Callable[[], Any]) -> Any:
        value = closure()
        self._exchange_once()
        return value

    @disable_compile
    def _exchange_once(self) -> None:
        rounds = self._sync
        if self._skips and rounds.exchange.is_open:
            raise InvalidInput(
                "gradients are not exchanged yet: call synchronize() before skip_synchronize()."
            )
        if not self._skips and not rounds.done:
            rounds.run()
        rounds.done = False


def has_unapplied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients have come for a `DistributedOptimizer` since its newest step."""
    return isinstance(optimizer, _Distributed) and (
        optimizer._sync.has_unsynced_gradients or optimizer._sync.done
    )


def _rebind_step(optimizer: Any) -> None:
    """A scheduler made before the wrapping hung the plain class's `step` on the optimizer itself."""
    if "step" in optimizer.__dict__:

        def step(closure: Callable[[], Any] | None = None) -> Any:
            return type(optimizer).step(optimizer, closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # its mark
        optimizer.__dict__["step"] = step
