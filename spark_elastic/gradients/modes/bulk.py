"""Gradients on GPUs are summed there, by the bulk plane; those on the CPU as in `HostMode`.

While the plane's communicator is built, all of them travel through the host. The ranks agree at the end of a step, and
the next one begins on the plane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic_collectives import Group
from spark_elastic.gradients.bulk_plane import BulkPlane, BulkSums
from spark_elastic.gradients.layout import GradientLayout
from spark_elastic.gradients.modes.host import HostMode
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread

WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class BulkMode(HostMode):
    """Of a world that has a bulk plane."""

    def __init__(
        self, layout: GradientLayout, group: Group, may_overlap: Callable[[], bool], plane: BulkPlane
    ) -> None:
        super().__init__(layout, group, may_overlap)
        self.plane = plane
        self._before, self._after = layout.options.factors(group.size)
        self._wire = None if layout.options.wire is None else WIRES[layout.options.wire]
        self._sums: BulkSums | None = None  # of the newest step; None: all buckets travel through the host
        self._sent: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # each bucket, and the tensor that travels for it

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
