"""Gradients are summed in buckets of the host's memory, while backward still runs, as DDP's reducer does.

Gradients become views of flat buckets as they arrive, so that nothing is copied out. Hooks count them; complete buckets
go to a `StepReducer`, strictly in the order of the layout (R7, layout). A failed exchange changes no parameter: only
the contents of the buckets are void.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.bucket_memory import BucketMemory, Views
from spark_elastic.gradients.layout import GradientLayout
from spark_elastic.gradients.modes.local import LocalMode
from spark_elastic.gradients.step_reducer import StepReducer, coalesce_rows
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread


class HostMode(LocalMode):
    """Of a world whose gradients travel through memory of the host."""

    _reducer: StepReducer  # of the newest step; none in a process that trains alone

    def __init__(
        self,
        layout: GradientLayout,
        group: Group | None,
        may_overlap: Callable[[], bool],
        memory: BucketMemory | None = None,
    ) -> None:
        """
        Args:
            group: None: this process trains alone, and nothing is launched; for virtual shares only.
            may_overlap: whether complete buckets are launched while backward runs, and not only in `finish`.
            memory: None: one of its own.
        """
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
        for index in sorted(self.layout.sparse):
            self._launch_sparse(index)
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
        if not self._missing[number]:
            while (
                self._launched < self._bucket_count
                and not self._missing[self._launched]
                and self._may_overlap()
            ):
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

    def _launch_sparse(self, index: int) -> None:
        """Sum a gradient that lies in no bucket."""
        self._compare_once()
        parameter = self.layout.parameters[index]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._reducer.launch_sparse(index, coalesce_rows(self.layout.names[index], gradient))

    def _complete_buckets(self) -> None:
        """Wait for all sums, and have them where the gradients are."""
        self._reducer.complete_buckets()

    def _drain(self) -> None:
        """Wait until all launched work is done or has failed."""
        self._reducer.drain()

    def _check_unchanged(self, places: Views) -> None:
        """Buckets are summed while backward runs, so a later change would count on this rank only, or not at all.

        Args:
            places: where gradients were moved as they came.
        """
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
    """Gradients were changed after backward. name: of a parameter near the change."""
    return InvalidInput(
        f"gradients were changed between backward() and step(){f', at parameter {name!r}' if name else ''}: call "
        "optimizer.synchronize() before they are clipped or unscaled, and then optimizer.step() or "
        "scaler.step(optimizer) within `with optimizer.skip_synchronize():`."
    )
