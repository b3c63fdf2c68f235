"""Gradients that fit into one bucket of the host's memory are summed when backward is over, in one exchange a step.

The bucket is complete only with the last gradient: nothing could overlap with backward, and no hook follows it. What
the ranks tell each other at the end of the step (R6, step summary) lies behind the gradients, one byte an element: each
rank writes its own, and the sum with the zeros of the others has them all, exact in every dtype and on every wire.
"""

from __future__ import annotations

import numpy as np
import torch

from elastic_collectives import Group
from elastic_collectives.group import Array
from spark_elastic.clock import SystemClock
from spark_elastic.gradients.bucket_memory import cut_views
from spark_elastic.gradients.layout import GradientLayout
from spark_elastic.gradients.modes.local import LocalMode
from spark_elastic.gradients.stall import watch_collective
from spark_elastic.gradients.step_reducer import check_agreement
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread

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
    """Of a world whose gradients lie in one bucket. `finish` moves them there, and `carry` sums them."""

    follows_backward = False

    def __init__(self, layout: GradientLayout, group: Group, message_bytes: int) -> None:
        """message_bytes: of each rank's message; the same on all ranks."""
        super().__init__(layout)
        dtype, end = np.dtype(layout.buckets[0].dtype), layout.buckets[0].numel
        memory = group.buffer((end + group.size * message_bytes) * dtype.itemsize)
        self._group, self._array = group, memory.view(dtype)
        self.views = cut_views(layout.parameters, layout.buckets, [torch.from_numpy(self._array[:end])])
        self._messages = self._array[end:].reshape(group.size, message_bytes)
        self._clock = SystemClock()
        names, options = layout.names, layout.options
        self._wire = options.wire if dtype == np.float32 else None
        self._watch = watch_collective(group, lambda: names, options.warn_after, options.wait_at_most)
        self._is_compared = False  # the ranks have compared this layout

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        super().begin(passes, thread, timeline)
        self._thread, self._timeline = thread, timeline

    def finish(self) -> None:
        for index, parameter in enumerate(self.layout.parameters):
            self.present[index] = parameter.grad is not None
            self._place_gradient(index)

    def carry(self, message: Array) -> Array:
        """Sum the gradients. Returns the messages of all ranks, (size, bytes). Raises what `GradientExchange.finish`
        does."""
        complete = self._clock.now()
        self._messages.fill(0)
        self._messages[self._group.rank] = message
        self._thread.drain()
        if not self._is_compared:
            check_agreement(self._group, self.layout)
            self._is_compared = True
        begin = self._clock.now()
        with self._watch:
            self._group.allreduce(self._array, compression=self._wire)
        if self._timeline is not None:
            nbytes = self._array.nbytes
            self._timeline.write_gradients("gradients 0", nbytes, complete, begin, self._clock.now())
        self.has_open_step = False
        messages: Array = self._messages.astype(np.uint8)
        return messages
