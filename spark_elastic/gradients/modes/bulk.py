"""Gradients on GPUs are summed there, by the bulk plane; those on the CPU as in `HostMode`.

While the plane's communicator is built, all of them travel through the host. The ranks agree at the end of a step, and
the next one begins on the plane.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_collectives import Group
from spark_elastic.gradients.bulk_plane import BulkPlane, BulkStep
from spark_elastic.gradients.layout import GradientLayout
from spark_elastic.gradients.modes.host import HostMode
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread


class BulkMode(HostMode):
    """Of a world that has a bulk plane."""

    def __init__(
        self, layout: GradientLayout, group: Group, may_overlap: Callable[[], bool], plane: BulkPlane
    ) -> None:
        super().__init__(layout, group, may_overlap)
        self.plane = plane
        self._sums: BulkStep | None = None  # of the newest step; None: all buckets travel through the host

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        super().begin(passes, thread, timeline)
        self.bulk_seconds = self.plane.seconds
        self._sums = BulkStep(self.plane, self.layout.options) if self.plane.is_active else None

    def _sum_bucket(self, number: int) -> None:
        flat = self._memory.flats[number]
        if self._sums is not None and flat.device == self.plane.device:
            self._sums.launch(flat)
        else:
            super()._sum_bucket(number)

    def _complete_buckets(self) -> None:
        super()._complete_buckets()
        if self._sums is not None:
            self._reducer.call(self._sums.finish)
        if not self.plane.is_settled:
            self._reducer.call(self.plane.exchange_readiness)

    def _drain(self) -> None:
        super()._drain()
        if self._sums is not None:
            self._sums.abandon("a step was given up in the middle of its exchange")
