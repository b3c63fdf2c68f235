"""`DistributedOptimizer` for hand-written loops: any torch optimizer whose gradients are exchanged before each step.

Bucketed exchanges overlap backward: see `gradient_sync`, also for op=Adasum. The training thread owns everything here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients import reduction
from spark_elastic.gradients.buckets import divide_into_groups
from spark_elastic.gradients.determinism import align_tensors, describe_arithmetic
from spark_elastic.gradients.exchange import disable_compile
from spark_elastic.gradients.modes import make_change_error
from spark_elastic.gradients.module_state import multiply_rates
from spark_elastic.gradients.process_sets import ALL, ProcessSet, check_alone
from spark_elastic.gradients.reduction import Adasum, Average, NoneCompressor, ReduceOp, ReduceOptions
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.handwritten.torch_state import DistributedBase
from spark_elastic.horovod.ops.distributed_optimizer import validate_backward_passes
from spark_elastic.horovod.torch.gradient_sync import AdasumSync, GradientSync, NamedParameters
from spark_elastic.worker.context import get_context


def name_parameters(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> NamedParameters:
    """Return the optimizer's parameters with the user's names, in the order of `named`."""
    groups = [group["params"] for group in optimizer.param_groups]
    mine = [(f"{i}.{j}", parameter) for i, group in enumerate(groups) for j, parameter in enumerate(group)]
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
    own = {id(parameter) for _, parameter in mine}
    return [(name, parameter) for name, parameter in pairs if id(parameter) in own]


class AdasumOptimizer(DistributedBase):
    """The methods that `DistributedOptimizer` puts before those of the optimizer's own class if op is Adasum."""

    _adasum: AdasumSync

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with this rank's gradients and combine it with the others. closure: computes gradients. Raises
        CollectiveError: see `AdasumSync.combine_step`; `restore` of a committed state restores the optimizer, too."""
        self._opt_called = True  # a scheduler that was made before the wrapping looks for it
        plain = super().step
        return self._adasum.combine_step(plain if closure is None else lambda: plain(closure))

    step.hooked = True  # type: ignore[attr-defined] # the optimizer's own step has the profiling hooks

    def synchronize(self) -> None:
        """Do nothing: gradients are each rank's own."""

    def skip_synchronize(self) -> None:
        raise InvalidInput(
            "skip_synchronize() has no meaning with op=Adasum, which exchanges in step() alone."
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients add up until `step`."""

    def close(self) -> None:
        """Take the optimizer out of use, so that `join` counts the steps of another one."""
        self._adasum.close()


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
    process_set: ProcessSet = ALL,
    scale_lr: bool = False,
    loader: ElasticDataLoader | None = None,
) -> Plain:
    """Return `optimizer` with exchanged gradients: of the same class, over the same state and parameter groups.

    The gradients of `backward_passes_per_step` backward passes are summed, then summed over the ranks and, for
    Average, divided by their number.

    Args:
        compression: how float32 travels, or a `Compressor` of your own. It is called on the host, in any thread, for
            each gradient that has all its rows.
        op: Average, Sum or Adasum; for Adasum see `AdasumSync`.
        gradient_predivide_factor: f divides by f before the sum and by size / f after it.
        groups: parameters that travel together, as lists or as a number of groups to make.
        num_groups: the same, as a number.
        sparse_as_dense: gradients with missing rows become dense.
        process_set: the ranks that exchange; other ranks train alone.
        loader: with determinism="bitwise"; gradients are then added over its virtual shares, and not divided.
        scale_lr: multiply the rates by the present size of the set, once. A newcomer receives the rates of the others
            with their state.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if isinstance(optimizer, torch.optim.LBFGS | DistributedBase) or not hasattr(optimizer, "param_groups"):
        raise InvalidInput(
            f"DistributedOptimizer wraps a plain optimizer once, and never LBFGS; got {type(optimizer).__name__}."
        )
    check_alone("DistributedOptimizer", "use torch's DistributedDataParallel")
    reduce = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)
    passes = validate_backward_passes(backward_passes_per_step)
    by_user = None if named_parameters is None else list(named_parameters)
    named = name_parameters(optimizer, by_user)
    options = reduction.options_from_env(
        groups=_find_groups(named, groups if groups is not None else num_groups),
        average=op is Average,
        predivide=gradient_predivide_factor,
        wire=reduce.compression.wire,
        compressor=_find_custom_compressor(reduce.compression),
        sparse="dense" if sparse_as_dense else "sparse",
    )
    if loader is not None and loader.virtual_shares:
        plain = replace(options, predivide=1.0, wire=None, compressor=None)
        if op is Adasum or process_set is not ALL or options != plain:
            raise InvalidInput(
                "a loader with determinism='bitwise' adds gradients as they are, over all workers: leave op, "
                "compression, gradient_predivide_factor and process_set out."
            )
        options = replace(
            options, average=False, shares=loader.virtual_shares, arithmetic=describe_arithmetic()
        )
        align_tensors(parameter for _, parameter in named)
    if op is Adasum and (options.wire is not None or options.compressor is not None or options.groups):
        raise InvalidInput("op=Adasum combines each parameter by itself: leave compression and groups out.")
    added: type = AdasumOptimizer if op is Adasum else _Distributed
    distributed: Any = object.__new__(type(type(optimizer).__name__, (added, type(optimizer)), {}))
    distributed.__dict__ = optimizer.__dict__  # one state, which holders of the plain optimizer share
    if op is Adasum:
        distributed._adasum = AdasumSync(named, process_set)
    else:
        distributed._sync, distributed._named = GradientSync(named, options, passes, process_set), by_user
        distributed._followed = len(optimizer.param_groups)
        if loader is not None:
            loader.attach_sync(distributed._sync)
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
    log.warning(
        "DistributedOptimizer takes the learning rate as it is and does not multiply it by the world's size: "
        "scale_lr=True does, once, unless the program already does."
    )


def _find_custom_compressor(kind: type[reduction.Compressor]) -> type[reduction.Compressor] | None:
    """Return the compressor if the engine does not know it, else None."""
    plain = (kind.compress, kind.decompress) == (NoneCompressor.compress, NoneCompressor.decompress)
    return None if plain or kind.wire is not None else kind


def _find_groups(named: NamedParameters, wanted: int | Groups) -> tuple[tuple[int, ...], ...]:
    """Return the groups as numbers among the parameters that require a gradient."""
    numbers = {id(p): i for i, p in enumerate(p for _, p in named if p.requires_grad)}
    if isinstance(wanted, int):
        if wanted < 0:
            raise InvalidInput(f"groups must be lists of parameters, or a number of 1 or more; got {wanted}.")
        return divide_into_groups(len(numbers), wanted) if wanted else ()
    listed = [id(parameter) for group in wanted for parameter in group]
    if len(set(listed)) < len(listed) or not set(listed) <= numbers.keys():
        raise InvalidInput(
            "groups must hold parameters that the optimizer trains, each in one group at most."
        )
    return tuple(tuple(sorted(numbers[id(p)] for p in group)) for group in wanted if group)


class _Distributed(DistributedBase):
    """The methods that `DistributedOptimizer` puts before those of the optimizer's own class."""

    _sync: GradientSync
    _named: NamedParameters | None  # as the user gave them
    _skips: bool = False
    _followed: int  # groups whose gradients are exchanged

    def has_unapplied_gradients(self) -> bool:
        return self._sync.has_unsynced_gradients or self._sync.is_synchronized

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters, which all ranks add between the same two steps. A newcomer and a worker that goes
        back to a commit take the groups from the state."""
        super(DistributedBase, self).add_param_group(param_group)
        self.follow_groups()

    def follow_groups(self) -> None:
        """Exchange the gradients of what the groups hold now."""
        if "_sync" not in self.__dict__:
            return  # the plain class's own __init__
        if self._sync.has_unsynced_gradients and not self._sync.is_stale():
            raise InvalidInput(
                "a parameter group was added between backward() and step(): add it after step()."
            )
        self._followed = len(self.param_groups)
        self._sync.exchange.abandon()
        self._sync.exchange.set_parameters(name_parameters(self, self._named))

    @disable_compile
    def synchronize(self) -> None:
        """Exchange the gradients now, for example to clip them before `step`. Raises CollectiveError if the exchange
        broke: gradients are None, parameters and optimizer as they were."""
        self._sync.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not exchange gradients."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False
            # A `GradScaler` that has found infinities does not call `step`: it is done with these gradients, too.
            self._sync.is_synchronized = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange the gradients, unless `synchronize` did, and apply them. closure: computes gradients. Raises
        CollectiveError as `synchronize`."""
        self._opt_called = True  # a scheduler that was made before the wrapping looks for it
        if closure is not None:
            return super().step(lambda: self._compute_and_synchronize(closure))
        self._synchronize_once()
        return super().step()

    step.hooked = True  # type: ignore[attr-defined] # the optimizer's own step has the profiling hooks

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's name. A `GradScaler` reads it in its `step`, and changes gradients without another trace."""
        exchange = self._sync.exchange
        if exchange.mode.has_open_step and exchange.group is not None and exchange.group.size > 1:
            exchange.abandon()
            raise make_change_error()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, whatever `set_to_none` says: one that no rank computes is None after `step`, too."""
        self._sync.clear()
        mine = set(self._sync.exchange.parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in mine:
                    parameter.grad = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._sync.set_backward_passes(passes)

    def close(self) -> None:
        """End the `CollectiveThread` and detach the gradients; for processes that outlive their training."""
        self._sync.close()

    def _compute_and_synchronize(self, closure: Callable[[], Any]) -> Any:
        value = closure()
        self._synchronize_once()
        return value

    @disable_compile
    def _synchronize_once(self) -> None:
        sync = self._sync
        if self._skips and sync.exchange.mode.has_open_step:
            raise InvalidInput(
                "gradients are not exchanged yet: call synchronize() before skip_synchronize()."
            )
        if len(self.param_groups) != self._followed:  # else each rank would train the group alone
            raise InvalidInput(
                "a parameter group was added to the optimizer that DistributedOptimizer wraps: call add_param_group of "
                "the one that it returned."
            )
        if not self._skips and not sync.is_synchronized:
            sync.synchronize()
        sync.is_synchronized = False


def _rebind_step(optimizer: Any) -> None:
    """Replace the `step` of the plain class, which a scheduler made before the wrapping has set on the optimizer."""
    if "step" in optimizer.__dict__:

        def step(closure: Callable[[], Any] | None = None) -> Any:
            return type(optimizer).step(optimizer, closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # its mark
        optimizer.__dict__["step"] = step
