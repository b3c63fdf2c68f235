"""The gradients of a model, summed over the world step by step while backward still runs.

The exchange follows the parameters, the group and what the ranks agree on; a mode (`gradients.modes`) takes the
gradients. The training thread owns everything here; during backward the hooks do, one at a time, since autograd has a
thread for each device. A step that is given up half-way is drained before the next one begins. Layout and memory belong
to one group, and change only when a step begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import finalize, ref

import numpy as np
import torch

from elastic_collectives import Group
from spark_elastic.data.plan import Division
from spark_elastic.gradients.bulk_plane import get_or_start_bulk_plane
from spark_elastic.gradients.layout import ExchangedParameters
from spark_elastic.gradients.modes import BulkMode, HostMode, LocalMode, OneBucketMode, can_carry_messages
from spark_elastic.gradients.reduction import DEFAULT_OPTIONS, ExchangeOptions
from spark_elastic.gradients.share_mode import Observe, ShareMode
from spark_elastic.gradients.step_summary import Flags
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread, get_context

F = TypeVar("F", bound=Callable[..., Any])


class GradientExchange:
    """The gradients of one model's parameters, exchanged over groups that come and go. A step: `clear_and_begin`,
    backward passes, `finish`; then gradients hold the sums over all ranks and may be applied. Gradients that arrive
    outside of a step are not counted. `close` detaches the gradients from the buckets."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        options: ExchangeOptions = DEFAULT_OPTIONS,
        before_gradient: Callable[[], None] | None = None,
        get_thread: Callable[[], CollectiveThread | None] = lambda: None,
        timeline: Callable[[], Timeline | None] = lambda: None,
        may_overlap: Callable[[], bool] = lambda: True,
        count_message_bytes: Callable[[int], int] | None = None,
    ) -> None:
        """
        Args:
            before_gradient: begins a step before a gradient counts; for loops that call nothing before backward.
            get_thread: returns the group's thread when a step begins; None: the exchange uses a thread of its own.
            timeline: returns where to write the exchanges of a step.
            may_overlap: whether buckets go to the reducer while backward runs, and not only in `finish`.
            count_message_bytes: of so many parameters, how long the message is that travels with their gradients where
                the mode is a `OneBucketMode`, whose `carry` follows `finish`; None: there is none.
        """
        self._exchanged, self._options = ExchangedParameters(named_parameters), options
        self._before_gradient, self._may_overlap = before_gradient, may_overlap
        self._get_thread, self._get_timeline = get_thread, timeline
        self._count_message_bytes = count_message_bytes
        self._own_thread = CollectiveThread()
        self.group: Group | None = None  # of the newest step; None: the process trained alone
        self._sparse: frozenset[int] = frozenset()  # parameters that lie in no bucket; the same on all ranks
        # Takes the gradients of the newest step, and knows which of them came.
        self.mode = LocalMode(self._exchanged.lay_out(options, self._sparse))
        self._laid_out_for: object = None  # what the mode was made for: group, sparse parameters, division
        self._hook_lock = threading.RLock()
        self._unhook: Callable[[], Any] = lambda: None
        self._hook()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self._exchanged.parameters

    def clear_and_begin(self, group: Group | None, passes: int, division: Division | None = None) -> None:
        """Drop all gradients and begin a step. group: None trains alone. passes: backward passes until `finish`; 0 on a
        rank without rows. division: of the virtual shares among the ranks; None: equally."""
        self.clear()
        self.begin_with_gradients(group, passes, division)

    def begin_with_gradients(
        self, group: Group | None, passes: int, division: Division | None = None
    ) -> None:
        """As `clear_and_begin`, with the gradients that are there."""
        self.abandon()
        begins_world = group is not self.group
        if self._exchanged.follow_flags(begins_world):
            self._follow_parameters()
        if begins_world:  # newcomers do not know what the former world agreed on
            self._sparse = frozenset()
        thread = self._get_thread() or self._own_thread
        self._lay_out(group, division, thread)
        self.group = group
        self.mode.begin(passes, thread, self._get_timeline())

    def set_parameters(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Exchange the gradients of other parameters, from the next step on: groups were added or removed."""
        self._exchanged.replace(named)
        self._follow_parameters()

    def _follow_parameters(self) -> None:
        self.mode.hand_over([None] * len(self.mode.views))
        self._sparse, self._laid_out_for = frozenset(), None
        self.mode = LocalMode(self._exchanged.lay_out(self._options, self._sparse))
        self._hook()

    def _hook(self) -> None:
        """Follow backward passes where somebody wants to: a hook costs a small model as much as a layer."""
        self._unhook()
        follows = self.mode.follows_backward or self._before_gradient is not None
        self._unhook = hook_gradients(self.parameters, self._on_gradient) if follows else lambda: None

    def _lay_out(self, group: Group | None, division: Division | None, thread: CollectiveThread) -> None:
        """Choose the mode and lay the buckets out in the memory of `group`, unless they lie there already."""
        peers = group if group is not None and group.size > 1 else None
        if not self._options.shares:
            division = None
        elif division is None:
            division = Division.equal(1 if group is None else group.size, self._options.shares)
        if self._laid_out_for == (peers, self._sparse, division):
            return
        former, self.mode = self.mode, self._make_mode(peers, division, thread)
        self._laid_out_for = peers, self._sparse, division
        former.hand_over(self.mode.views)
        if former.follows_backward != self.mode.follows_backward:
            self._hook()

    def _make_mode(
        self, peers: Group | None, division: Division | None, thread: CollectiveThread
    ) -> LocalMode:
        layout = self._exchanged.lay_out(self._options, self._sparse)
        if division is not None:
            if (worker := get_context()) is not None:
                worker.wait_recorder.set_bitwise()
            return ShareMode(layout, peers, self._may_overlap, division)
        if peers is None:
            return LocalMode(layout)
        plane = get_or_start_bulk_plane(peers, self._exchanged.find_device(), self._options)
        if self._count_message_bytes is not None and self._before_gradient is None:
            nbytes = self._count_message_bytes(len(layout.parameters))
            # Ranks may see this differently.
            fits = np.array(plane is None and can_carry_messages(layout, peers, nbytes))
            if thread.drain_and_call(lambda: peers.allgather(fits)).all():
                return OneBucketMode(layout, peers, nbytes)
        if plane is None:
            return HostMode(layout, peers, self._may_overlap)
        if not plane.is_settled and not self._options.hybrid_recovery:
            thread.drain_and_call(plane.wait_until_ready)
        return BulkMode(layout, peers, self._may_overlap, plane)

    def begin_share(self, passes: int | None = None, observe: Observe | None = None) -> None:
        """Begin this rank's next virtual share: see `ShareMode.begin_share`."""
        assert isinstance(self.mode, ShareMode)
        self.mode.begin_share(passes, observe)

    def end_share(self) -> None:
        assert isinstance(self.mode, ShareMode)
        self.mode.end_share()

    def clear(self) -> None:
        """Give up the open step, if any, and drop all gradients."""
        self.abandon()
        for parameter in self.parameters:
            parameter.grad = None

    def adopt_sparse_parameters(self, found_sparse: Flags) -> None:
        """Take over which gradients are sparse on any rank, as all ranks agreed at the end of a step. In the first step
        of a world a sparse gradient travels dense, while the step summary tells the ranks of it: that takes no exchange
        of its own, and a rank without such a gradient is no special case."""
        if self._options.sparse == "sparse":
            numbers = np.flatnonzero(found_sparse).tolist()
            for parameter in (self.parameters[index] for index in numbers):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)
            self._sparse |= set(numbers)

    def finish(self) -> None:
        """Launch what was not launched (unused parameters, ranks without rows) and wait for all sums, which in
        `OneBucketMode` come with `carry`.

        Raises:
            MismatchError: in the first step of a world, ranks have other parameters or options than rank 0.
            CollectiveError: the group broke; the gradients are void.
            InvalidInput: gradients were changed since they arrived; the group cannot be used any more.
        """
        self.mode.finish()

    def abandon(self) -> None:
        """Give up the open step, if any. Where buckets were launched the group is aborted, since peers wait for the
        rest."""
        self.mode.abandon()

    def scale(self, factor: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def drop_absent(self, present: Flags) -> None:
        """Set gradients that no rank computed to None, as in a plain loop (R8, weighting)."""
        if 0 in present.tobytes():  # most steps have all of them
            for parameter, has_gradient in zip(self.parameters, present.tolist(), strict=True):
                if not has_gradient:
                    parameter.grad = None

    def close(self) -> None:
        self.abandon()
        self._own_thread.close()
        self._unhook()
        self.clear()
        self.mode, self._laid_out_for = LocalMode(self.mode.layout), None  # which frees the memory

    def _on_gradient(self, index: int) -> None:
        """Hook: autograd has added this parameter's gradient. Runs in the backward thread of its device."""
        with self._hook_lock:
            if self._before_gradient is not None:
                self._before_gradient()
            if self.mode.has_open_step:
                self.mode.on_gradient(index)


# ---- where torch calls us: in autograd's thread of a device, or between two graphs of a compiled caller


def make_weak_method(method: Callable[..., None], *arguments: object) -> Callable[..., None]:
    """Return a function that calls a method with these arguments while its object lives, and does nothing afterwards.
    The garbage collector cannot look into what autograd holds: an object that is referenced there is never freed."""
    owner, function = ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*_: object) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *arguments)

    return call


def hook_gradients(
    parameters: Sequence[torch.nn.Parameter], on_gradient: Callable[[int], None]
) -> Callable[[], Any]:
    """Call `on_gradient`, a method, with the number of a parameter whenever a backward pass has added its gradient.
    Returns a function that removes the hooks; they are also removed when the object of the method is freed."""
    handles = []
    for number, parameter in enumerate(parameters):
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # torch hooks no other; the hook stays while the parameter is frozen
        hook = make_weak_method(on_gradient, number)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(is_trained)
    remove = finalize(on_gradient.__self__, lambda: [handle.remove() for handle in handles])  # type: ignore[attr-defined]
    remove.atexit = False
    return remove


def disable_compile(function: F) -> F:
    """As `torch.compiler.disable`, for code with sockets and threads: a compiled caller calls it between two graphs.
    The compiler is imported at the first call, since the import takes seconds."""
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call_disabled(*arguments: Any, **named: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    return cast("F", call_disabled)
