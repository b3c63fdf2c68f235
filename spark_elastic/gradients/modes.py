"""The ways in which the gradients of a step come to their sums; a `GradientExchange` chooses one for each layout.

The training thread owns a mode; during backward the hooks do, one at a time. `share_mode` has one more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from elastic_collectives import Group
from elastic_collectives.operands import Array
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.bulk_plane import BulkPlane, BulkSums
from spark_elastic.gradients.layout import BucketMemory, GradientLayout, Views, cut_views
from spark_elastic.gradients.step_reducer import StallCheck, StepReducer, check_agreement, coalesce_rows
from spark_elastic.gradients.step_summary import Flags
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread


class LocalMode:
    """Takes the gradients of one step after another, in one layout and one group: `begin`, `on_gradient` for each
    gradient of each backward pass, `finish` or `abandon`. Here for a process that trains alone."""

    unit = "step"  # what has so many backward passes, in words
    in_share = False  # a virtual share was begun and not completed
    follows_backward = True  # it is to be told of each gradient when a backward pass has added it

    def __init__(self, layout: GradientLayout) -> None:
        self.layout = layout
        self.views: Views = [None] * len(layout.parameters)  # where gradients are moved; None: they stay
        self.has_open_step = False  # a step was begun, and neither finished nor abandoned: gradients count
        self.present: Flags = np.zeros(len(layout.parameters), np.bool_)  # which got a gradient in this step
        self.found_sparse: Flags = self.present.copy()  # which got a sparse one
        self.bulk_seconds: float | None = None  # until the bulk plane was in use; None: it is not, or not yet
        self._launched = 0  # buckets that were launched in this step
        self._passes = 0  # backward passes until `finish`
        self._arrivals: list[int] = []  # by parameter: passes that have added a gradient

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        count = len(self.layout.parameters)
        self._passes, self._arrivals = passes, [0] * count
        self.present, self.found_sparse = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self.has_open_step, self._launched = True, 0

    def on_gradient(self, index: int) -> None:
        self._count(index)
        self._place_gradient(index)

    def finish(self) -> None:
        self._place_absent()
        self.has_open_step = False

    @property
    def has_gradients(self) -> bool:
        return any(self.layout.parameters[i].grad is not None for i in self.present.nonzero()[0].tolist())

    @property
    def has_launched_buckets(self) -> bool:
        """Whether a step is open of which some buckets were launched: the peers wait for the rest."""
        return self.has_open_step and self._launched > 0

    def abandon(self) -> None:
        self.has_open_step = self.in_share = False

    def hand_over(self, views: Views) -> None:
        """Move the gradients in this mode's memory to the views of another one, or to memory of their own."""
        for parameter, own, view in zip(self.layout.parameters, self.views, views, strict=True):
            if own is not None and parameter.grad is own:
                parameter.grad = own.clone() if view is None else view.copy_(own)

    def _count(self, index: int) -> None:
        if self._arrivals[index] == self._passes:
            raise InvalidInput(
                f"the gradient of parameter {self.layout.names[index]!r} came more than {self._passes} times in one "
                f"{self.unit}: call step() after that many backward passes, and use checkpointing with "
                "use_reentrant=False."
            )
        self._arrivals[index] += 1
        self.present[index] = True

    def _place_gradient(self, index: int) -> None:
        """Make the parameter's gradient, wherever autograd or the user put it, its view."""
        parameter, view = self.layout.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = self._prepare_sparse(index, gradient, keeps_rows=view is None)
        if view is None:
            parameter.grad = gradient
        elif gradient is not view:
            if gradient is None:
                view.zero_()
            else:
                # A copy takes three passes over the memory; if backward added to zeros in the bucket, five.
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
            parameter.grad = view

    def _place_absent(self) -> None:
        """Place what no backward pass has brought: zeros, or what was there before the step."""
        for index in (~self.present).nonzero()[0].tolist():
            self._place_gradient(index)

    def _prepare_sparse(self, index: int, gradient: torch.Tensor, *, keeps_rows: bool) -> torch.Tensor:
        """Return what to exchange for a sparse gradient: itself with each row listed once, or its dense form."""
        sparse, name = self.layout.options.sparse, self.layout.names[index]
        if sparse == "refused":
            raise InvalidInput(f"parameter {name!r} has a sparse gradient: use sparse=False.")
        if sparse == "sparse":
            self.found_sparse[index] = True
            gradient = coalesce_rows(name, gradient)
            if keeps_rows:
                return gradient
        return gradient.detach().to_dense()


class HostMode(LocalMode):
    """Of a world whose gradients are summed in buckets of the host's memory, while backward still runs. Gradients
    become views of flat buckets as they arrive, so that nothing is copied out. Hooks count them; complete buckets go to
    a `StepReducer`, strictly in the order of the layout (R7, layout). A failed exchange changes no parameter: only the
    contents of the buckets are void."""

    _reducer: StepReducer  # of the newest step; none in a process that trains alone

    def __init__(
        self,
        layout: GradientLayout,
        group: Group | None,
        may_overlap: Callable[[], bool],
        memory: BucketMemory | None = None,
    ) -> None:
        """group: None: this process trains alone, with virtual shares. may_overlap: whether complete buckets are
        launched while backward runs, and not only in `finish`. memory: None: one of its own."""
        super().__init__(layout)
        self._memory = BucketMemory(layout.parameters, layout.buckets, group) if memory is None else memory
        self.views = self._memory.views
        self._group = group
        self._may_overlap = may_overlap
        self._bucket_count = 0 if group is None else len(layout.buckets)  # buckets that a step launches
        self._missing: list[int] = []  # by bucket: gradients that it still lacks
        self._versions: list[int | None] = []  # by bucket: its version after the newest gradient
        self._is_compared = False  # the ranks have compared this layout

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        super().begin(passes, thread, timeline)
        self._missing = [len(bucket.slices) * passes for bucket in self.layout.buckets]
        self._versions = [None] * len(self.layout.buckets)
        if self._group is not None:
            self._reducer = StepReducer(self.layout, self._memory, self._group, thread, timeline)

    def on_gradient(self, index: int) -> None:
        self._count(index)
        self._place_gradient(index)
        if self.views[index] is not None:
            self._record_write(index)

    def finish(self) -> None:
        self._check_unchanged(self.views)
        self._place_absent()
        self._launch_rest()
        for index in sorted(self.layout.sparse):  # they lie in no bucket
            self._compare_once()
            parameter = self.layout.parameters[index]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._reducer.launch_sparse(index, coalesce_rows(self.layout.names[index], gradient))
        self._complete_buckets()
        for index, gradient in self._reducer.sparse_results.items():
            self.layout.parameters[index].grad = gradient
        self.has_open_step = False

    def abandon(self) -> None:
        if self.has_open_step and self._group is not None:
            if self.has_launched_buckets:
                self._group.abort("a step was given up in the middle of its exchange")
            self._drain()
        super().abandon()

    def _record_write(self, index: int) -> None:
        """A gradient of a pass or a share lies in its bucket: launch the buckets that are complete by it."""
        number = self._memory.bucket_of[index]
        self._missing[number] -= 1
        self._versions[number] = self._memory.flats[number]._version
        if self._missing[number]:
            return
        while self._launched < self._bucket_count and not self._missing[self._launched]:
            if not self._may_overlap():
                return
            self._launch_next_bucket()

    def _launch_next_bucket(self) -> None:
        number = self._launched
        self._launched += 1
        self._compare_once()
        self._sum_bucket(number)

    def _sum_bucket(self, number: int) -> None:
        self._reducer.launch_bucket(number)

    def _compare_once(self) -> None:
        """Compare parameters and options before the engine sums anything."""
        if not self._is_compared:
            self._reducer.compare()
            self._is_compared = True

    def _launch_rest(self) -> None:
        while self._launched < self._bucket_count:
            self._launch_next_bucket()
        self._reducer.reduce_last_bucket()

    def _complete_buckets(self) -> None:
        self._reducer.complete_buckets()

    def _drain(self) -> None:
        self._reducer.drain()

    def _check_unchanged(self, places: Views) -> None:
        """Buckets are summed while backward runs, so a later change would count on this rank only, or not at all.
        places: where gradients were moved as they came."""
        for number, version in enumerate(self._versions):
            if version is not None and version != self._memory.flats[number]._version:
                raise self._refuse_change(self.layout.buckets[number].slices[0].index)
        for index, (parameter, place) in enumerate(zip(self.layout.parameters, places, strict=True)):
            if parameter.grad is not place and place is not None and self.present[index]:
                raise self._refuse_change(index)

    def _refuse_change(self, index: int) -> InvalidInput:
        self.abandon()
        return make_change_error(self.layout.names[index])


def make_change_error(name: str = "") -> InvalidInput:
    return InvalidInput(
        f"gradients were changed between backward() and step(){f', at parameter {name!r}' if name else ''}: call "
        "optimizer.synchronize() before they are clipped or unscaled, and then optimizer.step() or "
        "scaler.step(optimizer) within `with optimizer.skip_synchronize():`."
    )


MOST_BYTES = 1 << 16  # of the messages of all ranks in a bucket; more would hold up its sum


def can_carry_messages(layout: GradientLayout, group: Group, message_bytes: int) -> bool:
    """Whether all gradients lie in one bucket on the host, which is summed as it is, with room for so long messages."""
    options = layout.options
    if len(layout.buckets) != 1 or layout.buckets[0].dtype == "bfloat16":  # which numpy lacks
        return False
    if any(parameter.device.type != "cpu" for parameter in layout.parameters):
        return False
    plain = options.factors(group.size) == (1.0, 1.0) and options.compressor is None and not options.shares
    nbytes = group.size * message_bytes * layout.specs[0].itemsize
    return plain and options.sparse != "sparse" and nbytes <= MOST_BYTES


class OneBucketMode(LocalMode):
    """Of a world whose gradients lie in one bucket of the host's memory: `finish` moves them there when backward is
    over, since nothing could overlap with it, and `carry` sums them, in one exchange a step.

    What the ranks tell each other at the end of the step (R6, step summary) lies behind the gradients, one byte an
    element: each rank writes its own, and the sum with the zeros of the others has them all, exact in every dtype and
    on every wire."""

    follows_backward = False

    def __init__(self, layout: GradientLayout, group: Group, message_bytes: int) -> None:
        super().__init__(layout)
        dtype, end = np.dtype(layout.buckets[0].dtype), layout.buckets[0].numel
        memory = group.buffer((end + group.size * message_bytes) * dtype.itemsize)
        self._group, self._array = group, memory.view(dtype)
        self.views = cut_views(layout.parameters, layout.buckets, [torch.from_numpy(self._array[:end])])
        self._messages = self._array[end:].reshape(group.size, message_bytes)
        self._clock = SystemClock()
        self._sum = group.bind_allreduce(self._array, layout.options.wire if dtype == np.float32 else None)
        self._check = StallCheck(group, lambda: layout.names, layout.options)
        self._all, self._none = ~self.present, self.present  # never written to
        self._is_compared = False  # the ranks have compared this layout

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        self.has_open_step, self.found_sparse = True, self._none
        self._thread, self._timeline = thread, timeline

    def finish(self) -> None:
        parameters = self.layout.parameters
        gradients = [parameter.grad for parameter in parameters]
        if all(each is not None and not (each.is_sparse or each.requires_grad) for each in gradients):
            self.present = self._all
            torch._foreach_copy_(self.views, gradients)  # type: ignore[arg-type]
            for parameter, view in zip(parameters, self.views, strict=True):
                parameter.grad = view
            return
        self.present = np.array([each is not None for each in gradients])
        for index in range(len(parameters)):
            self._place_gradient(index)

    def carry(self, message: Array) -> Array:
        """Sum the gradients. Returns the messages of all ranks, (size, bytes). Raises as `GradientExchange.finish`."""
        complete = 0.0 if self._timeline is None else self._clock.now()
        self._messages.fill(0)
        self._messages[self._group.rank] = message
        self._thread.drain()
        if not self._is_compared:
            check_agreement(self._group, self.layout)
            self._is_compared = True
        begin = 0.0 if self._timeline is None else self._clock.now()
        with self._check:
            self._sum()
        if self._timeline is not None:
            nbytes = self._array.nbytes
            self._timeline.write_gradients("gradients 0", nbytes, complete, begin, self._clock.now())
        self.has_open_step = False
        messages: Array = self._messages.astype(np.uint8)
        return messages


WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class BulkMode(HostMode):
    """Of a world that has a bulk plane, which sums the gradients on GPUs; those on the CPU as in `HostMode`. While the
    plane's communicator is built, all of them travel through the host. The ranks agree at the end of a step, and the
    next one begins on the plane."""

    def __init__(
        self, layout: GradientLayout, group: Group, may_overlap: Callable[[], bool], plane: BulkPlane
    ) -> None:
        super().__init__(layout, group, may_overlap)
        self.plane = plane
        self._before, self._after = layout.options.factors(group.size)
        self._wire = None if layout.options.wire is None else WIRES[layout.options.wire]
        self._sums: BulkSums | None = None  # of the newest step; None: all buckets travel through the host
        # Each bucket, and the tensor that travels for it.
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        super().begin(passes, thread, timeline)
        self.bulk_seconds = self.plane.seconds
        self._sums, self._sent = BulkSums(self.plane) if self.plane.is_active else None, []

    def _sum_bucket(self, number: int) -> None:
        flat = self._memory.flats[number]
        if self._sums is None or flat.device != self.plane.device:
            super()._sum_bucket(number)
            return
        values = flat.data  # so that no change counts as one of the user's

        def start(process_group: Any) -> Any:
            if self._before != 1.0:
                values.mul_(self._before)
            sent = values if self._wire is None or values.dtype != torch.float32 else values.to(self._wire)
            self._sent.append((values, sent))
            return process_group.allreduce([sent])

        self._sums.launch(start)

    def _complete_buckets(self) -> None:
        super()._complete_buckets()
        if self._sums is not None:
            self._reducer.call(self._sums.finish)
        for values, sent in self._sent:
            if sent is not values:
                values.copy_(sent)
            if self._after != 1.0:
                values.mul_(self._after)
        self._sent = []
        if not self.plane.is_settled:
            self._reducer.call(self.plane.exchange_readiness)

    def _drain(self) -> None:
        super()._drain()
        if self._sums is not None:
            self._sums.abandon("a step was given up in the middle of its exchange")
