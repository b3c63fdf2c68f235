"""`DistributedOptimizer` for hand-written loops: any torch optimizer whose gradients are exchanged before each step.

Bucketed exchanges overlap backward; `rounds` has what a step is made of. Training thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.compression import Compressor, NoneCompressor
from spark_elastic.ops.passes import checked_passes
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduce_op import Adasum, Average, ReduceOp
from spark_elastic.ops.reduction import How
from spark_elastic.torch.adasum import ByDeltas, Deltas
from spark_elastic.torch.gradients.buckets import even_groups
from spark_elastic.torch.gradients.rounds import Rounds
from spark_elastic.torch.gradients.terms import as_set
from spark_elastic.torch.named import named_parameters_of
from spark_elastic.torch.optimizers import multiply_rates
from spark_elastic.torch.untraced import untraced
from spark_elastic.torch.wrapped import Wrapped
from spark_elastic.worker.context import current

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
    if isinstance(optimizer, torch.optim.LBFGS | Wrapped):
        raise InvalidInput(
            f"DistributedOptimizer wraps a plain optimizer once, and never LBFGS; got {type(optimizer).__name__}."
        )
    how = How.asked_of_gradients(op, gradient_predivide_factor, process_set, compression)
    passes = checked_passes(backward_passes_per_step)
    named = named_parameters_of(optimizer, named_parameters)
    terms = as_set(
        groups=_groups(named, groups if groups is not None else num_groups),
        average=op is Average,
        predivide=gradient_predivide_factor,
        wire=how.compression.wire,
        compressor=_own(how.compression),
        sparse="dense" if sparse_as_dense else "kept",
    )
    if op is Adasum and (terms.wire is not None or terms.compressor is not None or terms.groups):
        raise InvalidInput("op=Adasum combines each parameter by itself: leave compression and groups out.")
    added: type = ByDeltas if op is Adasum else _Distributed
    distributed: Any = object.__new__(type(type(optimizer).__name__, (added, type(optimizer)), {}))
    distributed.__dict__ = optimizer.__dict__  # one state: what holds the plain optimizer sees the same
    if op is Adasum:
        distributed._deltas = Deltas(named, process_set)
    else:
        distributed._rounds = Rounds(named, terms, passes, process_set)
    here = current()
    if scale_lr:
        multiply_rates(optimizer, process_set.size() if process_set.included() else 1)
    elif here is not None and here.group is not None and here.group.size > 1 and here.group.rank == 0:
        _tell_unscaled()
    _rehang_step(distributed)
    wrapped: Plain = distributed
    return wrapped


@lru_cache(maxsize=1)
def _tell_unscaled() -> None:
    """Once in a process."""
    log.warning(
        "DistributedOptimizer takes the learning rate as it is and does not multiply it by the world's size: "
        "scale_lr=True does, once."
    )


def _own(kind: type[Compressor]) -> type[Compressor] | None:
    """The compressor, if it is one that the engine does not know."""
    plain = (kind.compress, kind.decompress) == (NoneCompressor.compress, NoneCompressor.decompress)
    return None if plain or kind.wire is not None else kind


def _groups(named: list[tuple[str, torch.nn.Parameter]], wanted: int | Groups) -> tuple[tuple[int, ...], ...]:
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


class _Distributed(Wrapped):
    """What is added to the optimizer's own class. Never instantiated by itself."""

    _rounds: Rounds
    _skips: bool = False

    @untraced
    def synchronize(self) -> None:
        """Wait until the gradients hold the average or sum over all ranks; for clipping before `step`.

        Raises:
            CollectiveError: the exchange broke; gradients are None, parameters and optimizer as they were.
        """
        self._rounds.run()

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
            return super().step(lambda: self._exchanged(closure))
        self._exchange_once()
        return super().step()

    step.hooked = True  # type: ignore[attr-defined] # torch then leaves the profiling hooks to the own class's step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's name. A `GradScaler` asks in its `step`, whatever it found on this rank; what it does to gradients
        leaves no other trace."""
        exchange = self._rounds.exchange
        if exchange.is_open and exchange.group is not None and exchange.group.size > 1:
            raise exchange.changed()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients become None, whatever `set_to_none` says: one that no rank computes is None after `step`, too."""
        self._rounds.clear()
        mine = set(self._rounds.exchange.parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in mine:
                    parameter.grad = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._rounds.set_passes(passes)

    def close(self) -> None:
        """End the engine thread and let go of the gradients; for processes that outlive their training."""
        self._rounds.close()

    def _exchanged(self, closure: Callable[[], Any]) -> Any:
        value = closure()
        self._exchange_once()
        return value

    @untraced
    def _exchange_once(self) -> None:
        rounds = self._rounds
        if self._skips and rounds.exchange.is_open:
            raise InvalidInput(
                "gradients are not exchanged yet: call synchronize() before skip_synchronize()."
            )
        if not self._skips and not rounds.done:
            rounds.run()
        rounds.done = False


def has_unapplied(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients have come for a `DistributedOptimizer` since its newest step."""
    return isinstance(optimizer, _Distributed) and (optimizer._rounds.waits or optimizer._rounds.done)


def _rehang_step(optimizer: Any) -> None:
    """A scheduler made before the wrapping hung the plain class's `step` on the optimizer itself."""
    if "step" in optimizer.__dict__:

        def step(closure: Callable[[], Any] | None = None) -> Any:
            return type(optimizer).step(optimizer, closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # its mark
        optimizer.__dict__["step"] = step
