"""Gradients of one step, summed over the world while backward still runs.

Gradients become views of flat buckets as they arrive, so that nothing is copied out. Hooks tell which gradients are
there; complete buckets are dispatched strictly in the layout's order (R7). The training thread owns everything here;
during backward the hooks do, one at a time, since autograd has a thread for each device. A failed exchange changes no
parameter: only the memory of the buckets is void. A step that is given up half-way is drained before the next one
begins. Layout and memory belong to one group, and change only when a step is opened.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any
from weakref import finalize, ref

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.timeline import Timeline
from spark_elastic.torch.gradients import dispatch as sparse
from spark_elastic.torch.gradients.buckets import BUCKET_BYTES, Bucket, layout, layout_hash
from spark_elastic.torch.gradients.dispatch import Dispatch, Fusion
from spark_elastic.torch.gradients.exchange_options import (
    DEFAULT_OPTIONS,
    ExchangeOptions,
    build_specs,
    find_trainable,
)
from spark_elastic.worker.context import EngineThread

# Finds the quickest bucket size: sizes are tried in a world's first steps and timed by rank 0's clock.


CANDIDATES = (BUCKET_BYTES, 8 << 20, 64 << 20)
STEPS = 5  # of each; the first has new memory and is not counted
MARGIN = 0.97  # of the default's time: what another one must reach to be taken


class Tuner:
    """`wish` is the size for the next step. total: bytes of all gradients; sizes above it are not tried."""

    def __init__(self, total: int) -> None:
        self._left = [size for size in CANDIDATES if size < total] if total > min(CANDIDATES) else []
        self._times: dict[int, list[float]] = {}
        self.wish = self._left[0] if self._left else BUCKET_BYTES

    def took(self, seconds: float) -> None:
        """A step with the wished size, from the beginning of its first pass to the end of its exchange."""
        if not self._left:
            return
        times = self._times.setdefault(self.wish, [])
        times.append(seconds)
        if len(times) < STEPS:
            return
        del self._left[0]
        self.wish = self._left[0] if self._left else self._quickest()

    def _quickest(self) -> int:
        medians = {size: statistics.median(times[1:]) for size, times in self._times.items()}
        best = min(medians, key=medians.__getitem__)
        first = next(iter(medians))
        return best if medians[best] < MARGIN * medians[first] else first


# Hooks on gradients that do not keep their owner alive. The garbage collector cannot look into what autograd holds, so
# an object that is referenced from there would never be freed.


def weak_method(method: Callable[..., None]) -> Callable[..., None]:
    """Calls that method as long as its object lives; nothing from then on."""
    owner, function = ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: object) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *arguments)

    return call


def hook_gradients(
    parameters: Sequence[torch.nn.Parameter], arrived: Callable[[int], None]
) -> Callable[[], Any]:
    """From now on `arrived`, a method, is called with a parameter's number once a backward pass has added its gradient.

    Returns what ends that; so does the end of the method's object.
    """
    tell = weak_method(arrived)
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda tensor, number=number: tell(number))  # type: ignore[no-untyped-call]
        for number, parameter in enumerate(parameters)
    ]
    end = finalize(arrived.__self__, lambda: [handle.remove() for handle in handles])  # type: ignore[attr-defined]
    end.atexit = False
    return end


class GradientExchange:
    """The gradients of one model's parameters, exchanged over groups that come and go.

    A step: `begin`, backward passes, `finish`; then gradients hold the sums over all ranks and `apply` may follow.
    Gradients that arrive outside of a step are not counted. `close` detaches the gradients from the buckets.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        terms: ExchangeOptions = DEFAULT_OPTIONS,
        opener: Callable[[], None] | None = None,
        engine: Callable[[], EngineThread | None] = lambda: None,
        timeline: Callable[[], Timeline | None] = lambda: None,
        overlaps: Callable[[], bool] = lambda: True,
    ) -> None:
        """opener: called at a gradient that comes while no step is open, to `open` one; for loops that call nothing
        before backward. engine: the thread that serves the group at a step's opening; None: one of its own.
        timeline: what the exchanges of a step are written to. overlaps: whether buckets go out while backward runs, not
        in `finish` alone."""
        self._names, self._parameters, self._frozen = find_trainable(named_parameters)
        self._specs = build_specs(self._names, self._parameters)
        self._terms = terms
        self._bucket_bytes = terms.bucket_bytes  # of the next step
        self._sparse: frozenset[int] = frozenset()  # parameters that lie in no bucket; the same on all ranks
        self._found_sparse = np.zeros(len(self._specs), np.bool_)
        self._laid: object = None  # what the layout was made from: group, bucket size, sparse parameters
        self._tuner = Tuner(0)
        self._clock = SystemClock()
        self._began = 0.0
        self._fusion: Fusion | None = None  # None: alone, and gradients stay where autograd puts them
        self._group: Group | None = None
        self._agreed: Group | None = None
        self._lay_out_buckets(None)
        self._opener = opener
        self._overlaps = overlaps
        self._arrivals = [0] * len(self._parameters)
        self._waiting: list[int] = []  # by bucket: how many gradients it still lacks
        self._versions: list[int | None] = []  # by bucket: its version after its newest gradient
        self._launched = 0
        self._passes = 0
        self._open = False
        self._own = EngineThread()
        self._engine_now = engine
        self._timeline_now = timeline
        self._dispatch: Dispatch | None = None  # of the newest step; None: it trains alone
        self._arriving = threading.RLock()
        self._unhook = hook_gradients(self._parameters, self._on_gradient)

    def __enter__(self) -> GradientExchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which parameters got a gradient in this step, in the order of `parameters`."""
        return np.array(self._arrivals) > 0

    @property
    def sparse_parameters(self) -> npt.NDArray[np.bool_]:
        """Which gradients came sparse in this step, in the order of `parameters`."""
        return self._found_sparse.copy()

    @property
    def bucket_bytes(self) -> int:
        """The bucket size in bytes that this rank wishes for the next step."""
        return self._tuner.wish if self._terms.tuned else self._bucket_bytes

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient of the newest step is still there."""
        return any(
            times and p.grad is not None for times, p in zip(self._arrivals, self._parameters, strict=True)
        )

    @property
    def is_open(self) -> bool:
        """Whether a step was opened, and neither finished nor abandoned."""
        return self._open

    @property
    def is_partly_sent(self) -> bool:
        """Whether a step is open and some of its buckets have gone out."""
        return self._open and self._launched > 0

    @property
    def group(self) -> Group | None:
        """The group of the newest step; None: the process trained alone."""
        return self._group

    def begin(self, group: Group | None, passes: int) -> None:
        """Open a step without gradients. group: None trains alone. passes: backward passes until `finish`; 0 on a
        rank without rows."""
        self.clear()
        self.open(group, passes)

    def open(self, group: Group | None, passes: int) -> None:
        """Open a step; the gradients that are there stay. Arguments as for `begin`."""
        self.abandon()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InvalidInput(
                    f"parameter {name!r} was frozen when training began: let it require a gradient from the start."
                )
        engine = self._engine_now() or self._own
        if group is not self._group:  # newcomers do not know what the former world agreed on
            self._sparse, self._bucket_bytes = frozenset(), self._terms.bucket_bytes
            total = sum(spec.numel * spec.itemsize for spec in self._specs) if self._terms.tuned else 0
            self._tuner = Tuner(total)
        self._lay_out_buckets(group)
        self._group, self._passes, self._launched, self._open = group, passes, 0, True
        self._arrivals = [0] * len(self._parameters)
        self._began = self._clock.now()
        self._found_sparse[:] = False
        self._dispatch = None
        buckets: Sequence[Bucket] = ()
        if self._fusion is not None:
            buckets = self._fusion.buckets
            self._dispatch = Dispatch(self._fusion, self._names, self._terms, engine, self._timeline_now())
        self._waiting = [len(bucket.slices) * passes for bucket in buckets]
        self._versions = [None] * len(buckets)

    def clear(self) -> None:
        """Give up the open step, if any, and drop all gradients."""
        self.abandon()
        for parameter in self._parameters:
            parameter.grad = None

    def apply_agreement(self, found_sparse: npt.NDArray[np.bool_], bucket_bytes: int) -> None:
        """Take over what the trailer of a step agreed on: sparse gradients, and the next steps' bucket size."""
        if self._terms.sparse == "kept":
            for index in np.flatnonzero(found_sparse).tolist():
                gradient = self._parameters[index].grad
                if gradient is not None and not gradient.is_sparse:
                    self._parameters[index].grad = gradient.to_sparse(1)
            self._sparse |= set(np.flatnonzero(found_sparse).tolist())
        self._bucket_bytes = bucket_bytes

    def finish(self) -> None:
        """Send what has not gone out (unused parameters, ranks without rows) and wait for all sums.

        Raises:
            MismatchError: in the first step of a world, ranks have other parameters or terms than rank 0.
            CollectiveError: the group broke; the gradients are void.
            InvalidInput: gradients were changed since they arrived; the group is of no more use.
        """
        self._check_unchanged()
        for index, arrivals in enumerate(self._arrivals):
            if not arrivals:
                self._move_to_bucket(index)
        while self._launched < len(self._waiting):
            self._send_next_bucket()
        if self._dispatch is not None and self._fusion is not None:
            self._dispatch.reduce_last()
            self._send_sparse(self._dispatch)
            self._dispatch.wait()
            self._fusion.receive()
            for index, gradient in self._dispatch.rows.items():
                self._parameters[index].grad = gradient
        self._tuner.took(self._clock.now() - self._began)
        self._open = False

    def drain(self) -> None:
        """Wait until the buckets that have gone out are back, or broke."""
        if self._dispatch is not None:
            self._dispatch.drain()

    def abandon(self) -> None:
        """Give up the open step, if any: nothing of it is under way when this returns. Its group is of no more use
        once buckets have gone out, since the peers wait for the rest."""
        if self.is_partly_sent and self._group is not None:
            self._group.abort("a step was given up in the middle of its exchange")
        self.drain()
        self._open = False

    def reject_changed_gradients(self, name: str = "") -> InvalidInput:
        """Give up the open step, since gradients were changed after backward. Returns the error to raise.

        name: of a parameter near the change.
        """
        self.abandon()
        return InvalidInput(
            f"gradients were changed between backward() and step(){f', at parameter {name!r}' if name else ''}: call "
            "optimizer.synchronize() before they are clipped or unscaled, and then optimizer.step() or "
            "scaler.step(optimizer) within `with optimizer.skip_synchronize():`."
        )

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def drop_absent(self, present: npt.NDArray[np.bool_]) -> None:
        """Set gradients that no rank had to None, as in a plain loop (R8)."""
        for parameter, there in zip(self._parameters, present, strict=True):
            if not there:
                parameter.grad = None

    def close(self) -> None:
        self.abandon()
        self._own.close()
        self._unhook()
        self.clear()
        self._fusion = self._laid = self._dispatch = None

    def _lay_out_buckets(self, group: Group | None) -> None:
        """Lay out the buckets as agreed on, in the memory of `group`; nothing to do if they lie so already."""
        home = group if group is not None and group.size > 1 else None
        agreed = home, self._bucket_bytes, self._sparse
        if self._laid == agreed:
            return
        buckets = layout(self._specs, self._bucket_bytes, self._terms.groups, self._sparse)
        self.layout_hash = layout_hash(self._specs, buckets, self._terms.description)
        former, self._laid = self._fusion, agreed
        self._fusion = None if home is None else Fusion(self._parameters, buckets, home)
        if former is not None:
            former.hand_over(self._parameters, self._fusion)

    def _on_gradient(self, index: int) -> None:
        """Hook: autograd has added this parameter's gradient. Runs in the backward thread of its device."""
        with self._arriving:
            if self._opener is not None:
                self._opener()
            if self._open:
                self._count_gradient(index)

    def _count_gradient(self, index: int) -> None:
        if self._arrivals[index] == self._passes:
            raise InvalidInput(
                f"the gradient of parameter {self._names[index]!r} came more than {self._passes} times in one step: "
                "call step() after that many backward passes, and use checkpointing with use_reentrant=False."
            )
        self._move_to_bucket(index)
        self._arrivals[index] += 1
        if self._fusion is not None and index not in self._sparse:
            number = self._fusion.bucket_of[index]
            self._waiting[number] -= 1
            self._versions[number] = self._fusion.version(number)
            if not self._waiting[number]:
                self._send_complete_buckets()

    def _send_complete_buckets(self) -> None:
        while self._launched < len(self._waiting) and self._waiting[self._launched] == 0 and self._overlaps():
            self._send_next_bucket()

    def _check_unchanged(self) -> None:
        """Buckets are summed while backward runs, so a later change would count on this rank only, or not at all."""
        if self._fusion is None:
            return
        for number, version in enumerate(self._versions):
            if version is not None and version != self._fusion.version(number):
                raise self.reject_changed_gradients(self._names[self._fusion.buckets[number].slices[0].index])
        for index, (parameter, view) in enumerate(zip(self._parameters, self._fusion.views, strict=True)):
            if parameter.grad is not view and view is not None and self._arrivals[index]:
                raise self.reject_changed_gradients(self._names[index])

    def _move_to_bucket(self, index: int) -> None:
        """Make the parameter's gradient, wherever autograd or the user put it, the view of its bucket."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = self._prepare_sparse(index, gradient)
        view = None if self._fusion is None else self._fusion.views[index]
        if view is None:
            parameter.grad = gradient
        elif gradient is not view:
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            parameter.grad = view

    def _prepare_sparse(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """What is exchanged for a sparse gradient: its checked self, or its dense form."""
        if self._terms.sparse == "refused":
            raise InvalidInput(f"parameter {self._names[index]!r} has a sparse gradient: use sparse=False.")
        if self._terms.sparse == "kept":
            self._found_sparse[index] = True
            gradient = sparse.coalesce_rows(self._names[index], gradient)
            if self._fusion is None or index in self._sparse:
                return gradient
        return gradient.detach().to_dense()

    def _send_next_bucket(self) -> None:
        number, dispatch = self._launched, self._dispatch
        self._launched += 1
        assert dispatch is not None  # or there would be no bucket
        self._compare_once(dispatch)
        dispatch.send(number)

    def _compare_once(self, dispatch: Dispatch) -> None:
        """Before anything else goes to a new group: compare parameters and terms."""
        if self._group is not self._agreed:
            dispatch.compare(self.layout_hash, self._specs)
            self._agreed = self._group

    def _send_sparse(self, dispatch: Dispatch) -> None:
        """Dispatch the gradients that lie in no bucket, in the order of the parameters."""
        for index in sorted(self._sparse):
            self._compare_once(dispatch)
            parameter = self._parameters[index]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dispatch.gather(index, sparse.coalesce_rows(self._names[index], gradient))
