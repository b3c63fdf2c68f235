"""`DistributedOptimizer` for hand-written loops: any torch optimizer whose gradients are exchanged before each step.

Bucketed exchanges overlap backward. Every step takes the group of the process's current worker anew, since groups
change between worlds; a process that is no worker trains alone. Training thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import START
from spark_elastic.torch.exchange import GradientExchange
from spark_elastic.torch.reduce_op import Average, ReduceOp, Sum
from spark_elastic.torch.trailer import Trailer, exchange
from spark_elastic.worker.context import current
from spark_elastic.worker.seat import engine_of_process, group_of

Plain = TypeVar("Plain", bound=torch.optim.Optimizer)


def DistributedOptimizer(  # noqa: PLR0913 - name and arguments are Horovod's
    optimizer: Plain,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: object = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: object = None,
) -> Plain:
    """`optimizer` with exchanged gradients: of the same class, over the same state and parameter groups.

    The gradients of `backward_passes_per_step` backward passes are summed, then summed over the ranks and, for
    Average, divided by the world's size. gradient_predivide_factor: f divides by f before and by size / f after.

    Raises:
        InvalidInput: an argument is wrong, or not supported.
    """
    for name, wanted in (
        ("compression", compression is None),
        ("num_groups", num_groups == 0),
        ("groups", groups is None),
        ("sparse_as_dense", not sparse_as_dense),
        ("process_set", process_set is None),
    ):
        if not wanted:
            raise InvalidInput(f"DistributedOptimizer does not support {name} yet: leave it out.")
    if op not in (Average, Sum):
        raise InvalidInput(f"op must be Average or Sum; got {op!r}.")
    if isinstance(optimizer, torch.optim.LBFGS | _Distributed):
        raise InvalidInput(
            f"DistributedOptimizer wraps a plain optimizer once, and never LBFGS; got {type(optimizer).__name__}."
        )
    if backward_passes_per_step < 1:
        raise InvalidInput(f"backward_passes_per_step must be at least 1; got {backward_passes_per_step}.")
    if gradient_predivide_factor <= 0 or (op is Sum and gradient_predivide_factor != 1.0):
        raise InvalidInput("gradient_predivide_factor must be above 0, and left out with op=Sum.")
    named = _named(optimizer, named_parameters)
    kind = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    distributed: Any = object.__new__(kind)
    distributed.__dict__ = optimizer.__dict__  # one state: what holds the plain optimizer sees the same
    distributed._rounds = _Rounds(named, op, backward_passes_per_step, gradient_predivide_factor)
    distributed._rehang_step()
    wrapped: Plain = distributed
    return wrapped


class _Rounds:
    """Exchange after exchange over the groups of the current worker."""

    def __init__(
        self, named: list[tuple[str, torch.nn.Parameter]], op: ReduceOp, passes: int, predivide: float
    ) -> None:
        self._op = op
        self._passes = passes
        self._predivide = predivide
        self.exchange = GradientExchange(
            named, prescale=1.0 / predivide, opener=self._open, engine=engine_of_process
        )
        self._cleared = False  # zero_grad came: a gradient that does not arrive is None
        self.done = False  # the gradients that there are have been exchanged

    def _open(self) -> None:
        """Before a gradient counts: open a step in the current world, if none is."""
        if self.exchange.is_open and not self.stale():
            return
        if self.stale() and any(self.exchange.in_bucket):
            raise InvalidInput(
                "the world changed after backward(): call zero_grad() before the next backward()."
            )
        self.exchange.open(_current_group(), self._passes)
        self.done = False

    def set_passes(self, passes: int) -> None:
        if passes < 1 or self.exchange.is_open:
            raise InvalidInput(
                "backward_passes_per_step must be at least 1, and can be set between steps only."
            )
        self._passes = passes

    def stale(self) -> bool:
        """The open step belongs to a world that is over."""
        return self.exchange.is_open and self.exchange.group is not _current_group()

    def clear(self) -> None:
        """Gradients become zeros inside the buckets, so that backward adds to them without a copy."""
        if self.exchange.is_open and not self.stale():
            raise InvalidInput(
                "zero_grad() was called between backward() and step(): call it after step(), or synchronize() first."
            )
        self.exchange.abandon()
        self.exchange.zero()
        self._cleared, self.done = True, False

    def run(self) -> None:
        """Exchange what there is.

        Raises:
            CollectiveError: the exchange broke; gradients are None, parameters and optimizer as they were.
        """
        swap = self.exchange
        try:
            if self.stale():
                raise CollectiveError((), "the world changed between backward() and step()")
            self._open()
            group, present = swap.group, swap.present | self._kept()
            swap.finish()
            if group is not None:
                mine = Trailer(START, _version(), swap.layout_hash, 1, 0.0, 1.0, present)
                verdict = exchange(group, mine)
                present = verdict.present
                _agreed(verdict.version)
        except CollectiveError:
            swap.abandon()
            swap.drop_absent(np.zeros(len(swap.parameters), np.bool_))
            raise
        if group is not None and group.size > 1 and self._op is Average:
            swap.scale(self._predivide / group.size)
        swap.drop_absent(present)
        self._cleared, self.done = False, True

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Gradients that are there without a backward pass: of an earlier step, or put there by hand."""
        there = np.array([parameter.grad is not None for parameter in self.exchange.parameters])
        return there & ~np.array(self.exchange.in_bucket) if self._cleared else there


class _Distributed(torch.optim.Optimizer):
    """What is added to the optimizer's own class. Never instantiated by itself."""

    _rounds: _Rounds
    _skips: bool = False

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients may be zeros until `step`; of those, the ones that no rank computed become None."""
        self._rounds.clear()
        mine = set(self._rounds.exchange.parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in mine:
                    parameter.grad = None

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._rounds.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise InvalidInput("DistributedOptimizer takes no further parameters: add the group before wrapping.")

    def close(self) -> None:
        """End the engine thread and let go of the gradients; for processes that outlive their training."""
        self._rounds.exchange.close()

    def _exchanged(self, closure: Callable[[], Any]) -> Any:
        value = closure()
        self._exchange_once()
        return value

    def _exchange_once(self) -> None:
        rounds = self._rounds
        if self._skips and rounds.exchange.is_open:
            raise InvalidInput(
                "gradients are not exchanged yet: call synchronize() before skip_synchronize()."
            )
        if not self._skips and not rounds.done:
            rounds.run()
        rounds.done = False

    def _rehang_step(self) -> None:
        """A scheduler made before the wrapping hung the plain class's `step` on the optimizer itself."""
        if "step" in self.__dict__:

            def step(closure: Callable[[], Any] | None = None) -> Any:
                return type(self).step(self, closure)

            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # its mark
            self.__dict__["step"] = step


def _current_group() -> Group | None:
    """Of the current worker; None in a process that is none."""
    worker = current()
    return None if worker is None else group_of(worker)


def _version() -> int:
    """Newest version of the membership that this worker heard of (R6)."""
    worker = current()
    return 0 if worker is None or worker.session is None else worker.session.membership_version()


def _agreed(version: int) -> None:
    worker = current()
    if worker is not None:
        worker.floor.agree(version)


def _named(
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
