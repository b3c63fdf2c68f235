"""Gradients of one step, summed over the world while backward still runs, as DDP's reducer does.

Gradients become views of flat buckets as they arrive, so that nothing is copied out. Hooks count them; complete buckets
go to a `StepReducer`, strictly in the order of the layout (R7, layout). The training thread owns everything here;
during backward the hooks do, one at a time, since autograd has a thread for each device. A failed exchange changes no
parameter: only the contents of the buckets are void. A step that is given up half-way is drained before the next one
begins. Layout and memory belong to one group, and change only when a step is opened.

With virtual shares (`ExchangeOptions.shares`) the gradients of each share are added to those of the shares before it in
the order of `share_tree`, and taken from the parameters until `finish`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from weakref import finalize, ref

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.data.plan import Division
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.buckets import Bucket, build_buckets, hash_layout
from spark_elastic.gradients.bulk_plane import BulkPlane, get_or_start_bulk_plane
from spark_elastic.gradients.exchange_options import (
    DEFAULT_OPTIONS,
    ExchangeOptions,
    build_specs,
    find_trainable,
)
from spark_elastic.gradients.share_buckets import ShareBuckets
from spark_elastic.gradients.step_reducer import BucketMemory, StepReducer, coalesce_rows
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread

Flags = npt.NDArray[np.bool_]


def make_weak_method(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method while its object lives, and does nothing afterwards.

    The garbage collector cannot look into what autograd holds: an object that is referenced there is never freed.
    """
    owner, function = ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: object) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *arguments)

    return call


def hook_gradients(
    parameters: Sequence[torch.nn.Parameter], on_gradient: Callable[[int], None]
) -> Callable[[], Any]:
    """Call `on_gradient`, a method, with the number of a parameter whenever a backward pass has added its gradient.

    Returns a function that removes the hooks; they are also removed when the object of the method is freed.
    """
    call = make_weak_method(on_gradient)
    handles = []
    for number, parameter in enumerate(parameters):
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # torch hooks no other; the hook stays while the parameter is frozen
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda tensor, number=number: call(number))  # type: ignore[no-untyped-call]
        )
        parameter.requires_grad_(is_trained)
    remove = finalize(on_gradient.__self__, lambda: [handle.remove() for handle in handles])  # type: ignore[attr-defined]
    remove.atexit = False
    return remove


@dataclass
class _Step:
    """The progress of one step: which gradients have arrived, and which buckets were launched."""

    passes: int  # backward passes until `finish`
    arrivals: list[int]  # by parameter: passes that have added a gradient
    found: Flags  # by parameter: whether it got a gradient
    found_sparse: Flags  # by parameter: whether its gradient came sparse
    found_dense: Flags  # by parameter: the same for its other form, in a virtual share
    missing: list[int]  # by bucket: gradients that it still lacks
    write_counts: list[int | None]  # by bucket: its write count after the newest gradient
    reducer: StepReducer | None  # None: this process trains alone
    launched: int = 0  # buckets that `reducer` has got
    is_open: bool = True  # gradients count, until it is finished or given up
    shares_left: int = 0  # virtual shares of this rank that were not completed
    in_share: bool = False  # whether one was begun and not completed
    # Called with each parameter's gradient of the virtual share under way.
    observe: Callable[[int, torch.Tensor | None], None] | None = None
    # By parameter: the sparse gradients of the virtual shares.
    listed: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class GradientExchange:
    """The gradients of one model's parameters, exchanged over groups that come and go.

    A step: `begin`, backward passes, `finish`; then gradients hold the sums over all ranks and may be applied.
    Gradients that arrive outside of a step are not counted. `close` detaches the gradients from the buckets.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        options: ExchangeOptions = DEFAULT_OPTIONS,
        before_gradient: Callable[[], None] | None = None,
        get_thread: Callable[[], CollectiveThread | None] = lambda: None,
        timeline: Callable[[], Timeline | None] = lambda: None,
        may_overlap: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            before_gradient: calls `open` before a gradient counts; for loops that call nothing before backward.
            get_thread: returns the group's thread when a step is opened; None: the exchange uses a thread of its own.
            timeline: returns where to write the exchanges of a step.
            may_overlap: whether buckets go to the reducer while backward runs, and not only in `finish`.
        """
        self._named = list(named_parameters)
        # Parameters that were trained when the exchange was made, by name: the first of those that it exchanges.
        self._first = find_trainable(self._named)
        self._options = options
        self._before_gradient, self._may_overlap = before_gradient, may_overlap
        self._get_thread, self._get_timeline = get_thread, timeline
        self._own_thread = CollectiveThread()
        self._group: Group | None = None  # of the newest step
        self._plane: BulkPlane | None = None  # of this group; None: gradients travel through host memory
        self._compared: Group | None = None  # the group whose ranks have compared parameters and options
        self._sparse: frozenset[int] = frozenset()  # parameters that lie in no bucket; the same on all ranks
        self._memory: BucketMemory | None = None  # None: alone, and gradients stay where autograd puts them
        self._laid_out_for: object = None  # what the layout was made from: group, sparse parameters, division
        self._hook_lock = threading.RLock()
        self._unhook: Callable[[], Any] = lambda: None
        self._exchange_only(self._first)
        if not options.shares:  # whose memory is that of a first step
            self._lay_out_buckets(None)
        self._step = self._make_step(0, None)
        self._step.is_open = False

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
    def present(self) -> Flags:
        """Which parameters got a gradient in this step, in the order of `parameters`."""
        return self._step.found.copy()

    @property
    def found_sparse(self) -> Flags:
        """Which gradients came sparse in this step, in the order of `parameters`."""
        return self._step.found_sparse.copy()

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient of the newest step is still there."""
        if self._options.shares and self._step.is_open:
            return True
        return any(
            found and p.grad is not None for found, p in zip(self._step.found, self._parameters, strict=True)
        )

    @property
    def bulk_seconds(self) -> float | None:
        """From the beginning of the bulk plane's communicator until it was in use; None: it is not, or not yet."""
        return None if self._plane is None else self._plane.seconds

    @property
    def has_open_step(self) -> bool:
        """Whether a step was opened, and neither finished nor abandoned."""
        return self._step.is_open

    @property
    def in_share(self) -> bool:
        """Whether a virtual share was begun and not completed."""
        return self._step.is_open and self._step.in_share

    @property
    def has_launched_buckets(self) -> bool:
        """Whether a step is open and some of its buckets were launched."""
        return self._step.is_open and self._step.launched > 0

    @property
    def group(self) -> Group | None:
        """The group of the newest step; None: the process trained alone."""
        return self._group

    def begin(self, group: Group | None, passes: int, division: Division | None = None) -> None:
        """Open a step without gradients.

        Args:
            group: None trains alone.
            passes: backward passes until `finish`; 0 on a rank without rows.
            division: of the virtual shares among the ranks; None: equally.
        """
        self.clear()
        self.open(group, passes, division)

    def open(self, group: Group | None, passes: int, division: Division | None = None) -> None:
        """Open a step; gradients that are there stay. Arguments as for `begin`."""
        self.abandon()
        self._follow_flags(group is not self._group)
        thread = self._get_thread() or self._own_thread
        if group is not self._group:  # newcomers do not know what the former world agreed on
            self._sparse = frozenset()
            self._plane = None
            if group is not None:
                self._plane = get_or_start_bulk_plane(group, self._find_device(), self._options)
            if self._plane is not None and not self._plane.is_settled and not self._options.hybrid_recovery:
                thread.drain_and_call(self._plane.wait_until_ready)
        self._lay_out_buckets(group, division)
        self._group = group
        self._step = self._make_step(passes, thread)
        if isinstance(self._memory, ShareBuckets):
            self._memory.begin()

    def set_parameters(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Exchange the gradients of other parameters, from the next step on: groups were added or removed."""
        self._named = list(named)
        own = {id(parameter) for _, parameter in self._named}
        self._first = {name: parameter for name, parameter in self._first.items() if id(parameter) in own}
        self._exchange_only(self._first)

    def _follow_flags(self, begins_world: bool) -> None:
        """Exchange the parameters that were trained at first or are trained now, and in one world those that were in
        between: what a newcomer knows from the state, so that all ranks have the same."""
        if begins_world or any(parameter.requires_grad for _, parameter in self._frozen):
            former = {} if begins_world else dict(zip(self._names, self._parameters, strict=True))
            wanted = {**self._first, **former, **find_trainable(self._named)}
            if wanted.keys() != set(self._names):
                self._exchange_only(wanted)

    def _exchange_only(self, wanted: Mapping[str, torch.nn.Parameter]) -> None:
        """Exchange these parameters by name, those of the beginning first; between two steps. Gradients stay."""
        if self._memory is not None:
            self._memory.hand_over(self._parameters, None)
        later = {name: p for name, p in self._named if name in wanted and name not in self._first}
        exchanged = {**self._first, **later}
        self._names = list(exchanged)
        self._parameters: list[torch.nn.Parameter] = list(exchanged.values())
        self._frozen = [(name, p) for name, p in self._named if name not in exchanged]
        self._specs = build_specs(self._names, self._parameters)
        self._memory = self._laid_out_for = self._compared = None
        self._sparse = frozenset()
        self._unhook()
        self._unhook = hook_gradients(self._parameters, self._on_gradient)

    def _find_device(self) -> torch.device:
        """The first device that is not the CPU, whose gradients the bulk plane can sum; the CPU if there is none."""
        devices = [parameter.device for parameter in self._parameters]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def _make_step(self, passes: int, thread: CollectiveThread | None) -> _Step:
        buckets: Sequence[Bucket] = ()
        reducer = None
        if self._memory is not None and thread is not None:
            buckets = self._memory.buckets
            if self._memory.group is not None:
                plane = self._plane if self._plane is not None and self._plane.is_active else None
                reducer = StepReducer(
                    self._memory, self._names, self._options, thread, self._get_timeline(), plane
                )
        shares = self._memory.share_count if isinstance(self._memory, ShareBuckets) else 0
        return _Step(
            passes,
            arrivals=[0] * len(self._parameters),
            found=np.zeros(len(self._parameters), np.bool_),
            found_sparse=np.zeros(len(self._parameters), np.bool_),
            found_dense=np.zeros(len(self._parameters), np.bool_),
            missing=[len(bucket.slices) * (shares or passes) for bucket in buckets],
            write_counts=[None] * len(buckets),
            reducer=reducer,
            shares_left=shares,
        )

    # ---- virtual shares

    def begin_share(
        self,
        passes: int | None = None,
        observe: Callable[[int, torch.Tensor | None], None] | None = None,
    ) -> None:
        """Begin this rank's next virtual share.

        Args:
            passes: backward passes until `end_share`; None: as given to `open`.
            observe: called with the number of each parameter and its gradient of the share.
        """
        step = self._step
        assert isinstance(self._memory, ShareBuckets)
        step.shares_left -= 1
        step.in_share, step.observe = True, observe
        step.arrivals = [0] * len(self._parameters)
        step.passes = step.passes if passes is None else passes
        self._memory.begin_share()

    def end_share(self) -> None:
        """End the share: add the gradients that not all passes brought, and launch the buckets that are complete."""
        for index, arrivals in enumerate(self._step.arrivals):
            if arrivals < self._step.passes or not arrivals:  # not all passes used it
                self._add_to_tree(index)
        self._step.in_share = False
        self._launch_complete_buckets()

    def _add_to_tree(self, index: int) -> None:
        """Add the parameter's gradient of the share to those of the shares before."""
        step, memory, parameter = self._step, self._memory, self._parameters[index]
        assert isinstance(memory, ShareBuckets)
        gradient = parameter.grad
        if step.observe is not None:
            step.observe(index, gradient)
        if gradient is not None and gradient.is_sparse and self._options.sparse != "dense":
            self._list_sparse(index, gradient)
            gradient = None
        elif gradient is not None:
            gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            step.found_dense[index] = True
        parameter.grad = None if step.shares_left else memory.views[index]
        if index in self._sparse:
            return
        memory.add(index, gradient)
        number = memory.bucket_of[index]
        step.missing[number] -= 1
        step.write_counts[number] = memory.write_count(number)

    def _list_sparse(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a share's sparse gradient: the rows of all shares are listed in their order, and then added."""
        if self._options.sparse == "refused":
            raise InvalidInput(f"parameter {self._names[index]!r} has a sparse gradient: use sparse=False.")
        self._step.found_sparse[index] = True
        self._step.listed.setdefault(index, []).append(coalesce_rows(self._names[index], gradient))

    def _finish_shares(self, reducer: StepReducer | None) -> None:
        """Put the sums over all virtual shares, which are complete, to the parameters."""
        step = self._step
        assert isinstance(self._memory, ShareBuckets)
        for index, total in enumerate(self._memory.sums):
            self._parameters[index].grad = total
        if self._options.sparse != "sparse":
            return
        listed = step.found_sparse if reducer is None else reducer.reduce_any(step.found_sparse)
        numbers = np.flatnonzero(listed).tolist()
        for index in np.flatnonzero(step.found_dense).tolist():
            if index in self._sparse or listed[index]:
                raise InvalidInput(
                    f"parameter {self._names[index]!r} has a sparse gradient in one virtual share and a dense one in "
                    "another: use sparse=False."
                )
        for index in numbers:
            own = self._concatenate(index)
            if reducer is not None:
                reducer.launch_gather(index, own)
            else:
                self._parameters[index].grad = own.coalesce()
        if reducer is not None:
            reducer.wait()
            for index in numbers:
                rows = reducer.sparse_results[index].coalesce()
                self._parameters[index].grad = rows.to(self._parameters[index].device)

    def _concatenate(self, index: int) -> torch.Tensor:
        """The rows that the sparse gradients of this rank's shares list."""
        parameter, parts = self._parameters[index], self._step.listed.get(index, [])
        parts = parts or [coalesce_rows(self._names[index], torch.zeros_like(parameter))]
        rows = torch.cat([part.indices() for part in parts], dim=1)
        values = torch.cat([part.values() for part in parts])
        return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)

    def _settle_plane(self, thread: CollectiveThread) -> None:
        """Once every rank can sum on its device, the next step does; all ranks agree at the end of a step."""
        if self._plane is not None and not self._plane.is_settled:
            thread.drain_and_call(self._plane.exchange_readiness)

    # ---- a step

    def clear(self) -> None:
        """Give up the open step, if any, and drop all gradients."""
        self.abandon()
        for parameter in self._parameters:
            parameter.grad = None

    def adopt_sparse_parameters(self, found_sparse: Flags) -> None:
        """Take over which gradients are sparse on any rank, as all ranks agreed at the end of a step.

        In the first step of a world a sparse gradient travels dense, while the step summary tells the ranks of it: that
        takes no exchange of its own, and a rank without such a gradient is no special case.
        """
        if self._options.sparse == "sparse":
            for index in np.flatnonzero(found_sparse).tolist():
                gradient = self._parameters[index].grad
                if gradient is not None and not gradient.is_sparse:
                    self._parameters[index].grad = gradient.to_sparse(1)
            self._sparse |= set(np.flatnonzero(found_sparse).tolist())

    def finish(self) -> None:
        """Launch what was not launched (unused parameters, ranks without rows) and wait for all sums.

        Raises:
            MismatchError: in the first step of a world, ranks have other parameters or options than rank 0.
            CollectiveError: the group broke; the gradients are void.
            InvalidInput: gradients were changed since they arrived; the group cannot be used any more.
        """
        step = self._step
        if step.shares_left or step.in_share:
            raise InvalidInput(
                "step() was called before the last virtual share: take all shares that the loader yields for a step."
            )
        self._check_unchanged()
        for index, found in enumerate(step.found):
            if not found and not self._options.shares:
                self._move_to_bucket(index)
        while step.reducer is not None and step.launched < len(step.missing):
            self._launch_next_bucket()
        if step.reducer is not None and self._memory is not None:
            step.reducer.reduce_last_bucket()
            if not self._options.shares:
                self._launch_sparse(step.reducer)
            step.reducer.complete_buckets()
            self._settle_plane(self._get_thread() or self._own_thread)
            for index, gradient in step.reducer.sparse_results.items():
                self._parameters[index].grad = gradient
        if self._options.shares:
            self._finish_shares(step.reducer)
        step.is_open = False

    def drain(self) -> None:
        """Wait until the launched buckets are summed, or have failed."""
        if self._step.reducer is not None:
            self._step.reducer.drain()

    def abandon(self) -> None:
        """Give up the open step, if any; nothing of it is in progress when this returns. If buckets were launched, the
        group is aborted, since the peers wait for the rest."""
        if self.has_launched_buckets and self._group is not None:
            self._group.abort("a step was given up in the middle of its exchange")
        self.drain()
        self._step.is_open = False

    def abandon_and_make_error(self, name: str = "") -> InvalidInput:
        """Give up the open step, since gradients were changed after backward. Returns the error to raise.

        Args:
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

    def drop_absent(self, present: Flags) -> None:
        """Set gradients that no rank computed to None, as in a plain loop (R8, weighting)."""
        for parameter, has_gradient in zip(self._parameters, present, strict=True):
            if not has_gradient:
                parameter.grad = None

    def close(self) -> None:
        self.abandon()
        self._own_thread.close()
        self._unhook()
        self.clear()
        self._memory = self._laid_out_for = self._step.reducer = None

    def _lay_out_buckets(self, group: Group | None, division: Division | None = None) -> None:
        """Lay out the buckets in the memory of `group`, unless they lie there already."""
        exchanging_group = group if group is not None and group.size > 1 else None
        shares = self._options.shares
        if shares and division is None:
            division = Division.equal(1 if group is None else group.size, shares)
        wanted = exchanging_group, self._sparse, division if shares else None
        if self._laid_out_for == wanted:
            return
        buckets = build_buckets(self._specs, self._options.bucket_bytes, self._options.groups, self._sparse)
        self.layout_hash = hash_layout(self._specs, buckets, self._options.description)
        former, self._laid_out_for = self._memory, wanted
        self._memory = self._allocate(buckets, exchanging_group, division)
        if former is not None:
            former.hand_over(self._parameters, self._memory)

    def _allocate(
        self, buckets: Sequence[Bucket], group: Group | None, division: Division | None
    ) -> BucketMemory | None:
        if self._options.shares:
            assert division is not None
            return ShareBuckets(self._parameters, buckets, group, division)
        return None if group is None else BucketMemory(self._parameters, buckets, group)

    def _on_gradient(self, index: int) -> None:
        """Hook: autograd has added this parameter's gradient. Runs in the backward thread of its device."""
        with self._hook_lock:
            if self._before_gradient is not None:
                self._before_gradient()
            if self._step.is_open:
                self._count_gradient(index)

    def _count_gradient(self, index: int) -> None:
        step = self._step
        if step.arrivals[index] == step.passes:
            raise InvalidInput(
                f"the gradient of parameter {self._names[index]!r} came more than {step.passes} times in one "
                f"{'virtual share' if self._options.shares else 'step'}: "
                "call step() after that many backward passes, and use checkpointing with use_reentrant=False."
            )
        step.found[index] = True
        if self._options.shares:
            step.arrivals[index] += 1
            if step.arrivals[index] == step.passes:
                self._add_to_tree(index)
                self._launch_complete_buckets()
            return
        self._move_to_bucket(index)
        step.arrivals[index] += 1
        if self._memory is not None and index not in self._sparse:
            number = self._memory.bucket_of[index]
            step.missing[number] -= 1
            step.write_counts[number] = self._memory.write_count(number)
            if not step.missing[number]:
                self._launch_complete_buckets()

    def _launch_complete_buckets(self) -> None:
        step = self._step
        if step.reducer is None:
            return
        while step.launched < len(step.missing) and step.missing[step.launched] == 0 and self._may_overlap():
            self._launch_next_bucket()

    def _check_unchanged(self) -> None:
        """Buckets are summed while backward runs, so a later change would count on this rank only, or not at all."""
        if self._memory is None:
            return
        for number, count in enumerate(self._step.write_counts):
            if count is not None and count != self._memory.write_count(number):
                raise self.abandon_and_make_error(self._names[self._memory.buckets[number].slices[0].index])
        for index, (parameter, view) in enumerate(zip(self._parameters, self._memory.views, strict=True)):
            if parameter.grad is not view and view is not None and self._step.found[index]:
                raise self.abandon_and_make_error(self._names[index])

    def _move_to_bucket(self, index: int) -> None:
        """Make the parameter's gradient, wherever autograd or the user put it, the view of its bucket."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = self._prepare_sparse(index, gradient)
        view = None if self._memory is None else self._memory.views[index]
        if view is None:
            parameter.grad = gradient
        elif gradient is not view:
            if gradient is None:
                view.zero_()
            else:
                # A copy takes three passes over the memory; if backward added to zeros in the bucket, it would
                # take five.
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            parameter.grad = view

    def _prepare_sparse(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what to exchange for a sparse gradient: itself with each row listed once, or its dense form."""
        if self._options.sparse == "refused":
            raise InvalidInput(f"parameter {self._names[index]!r} has a sparse gradient: use sparse=False.")
        if self._options.sparse == "sparse":
            self._step.found_sparse[index] = True
            gradient = coalesce_rows(self._names[index], gradient)
            if self._memory is None or index in self._sparse:
                return gradient
        return gradient.detach().to_dense()

    def _launch_next_bucket(self) -> None:
        number, reducer = self._step.launched, self._step.reducer
        self._step.launched += 1
        assert reducer is not None  # or there would be no bucket
        self._compare_once(reducer)
        reducer.launch_bucket(number)

    def _compare_once(self, reducer: StepReducer) -> None:
        """Compare parameters and options before the engine sums anything for a new group."""
        if self._group is not self._compared:
            reducer.compare(self.layout_hash, self._specs)
            self._compared = self._group

    def _launch_sparse(self, reducer: StepReducer) -> None:
        """Launch the sums of gradients that lie in no bucket, in the order of the parameters."""
        for index in sorted(self._sparse):
            self._compare_once(reducer)
            parameter = self._parameters[index]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            reducer.launch_sparse(index, coalesce_rows(self._names[index], gradient))
