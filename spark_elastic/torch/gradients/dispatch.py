"""The collectives of one step's gradients: in the same order on all ranks (R7), on the engine's thread.

The last bucket is the exception. Nothing is left that its sum could overlap with, so the training thread makes it. The
training thread owns everything here; the engine's thread runs only what it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import numpy as np
import torch

from spark_elastic.clock import SystemClock
from spark_elastic.ops.timeline import Timeline
from spark_elastic.torch.gradients import sparse
from spark_elastic.torch.gradients.agreement import agree
from spark_elastic.torch.gradients.buckets import Spec
from spark_elastic.torch.gradients.fusion import Fusion
from spark_elastic.torch.gradients.own_compression import allreduce_as
from spark_elastic.torch.gradients.stalls import inspected
from spark_elastic.torch.gradients.terms import Terms
from spark_elastic.worker.engine_thread import EngineThread


class Dispatch:
    """Hands the buckets and sparse gradients of one step to the engine's thread. After a failure the rest fails, too.

    rows: the sums of the sparse gradients by number of parameter, complete after `wait`.
    """

    def __init__(
        self,
        fusion: Fusion,
        names: Sequence[str],
        terms: Terms,
        engine: EngineThread,
        timeline: Timeline | None,
    ) -> None:
        """names: of all parameters, for messages. timeline: what the exchanges are written to."""
        self.rows: dict[int, torch.Tensor] = {}
        self._fusion = fusion
        self._group = fusion.group
        self._names = names
        self._terms = terms
        self._engine = engine
        self._timeline = timeline
        self._clock = SystemClock()
        self._newest: Future[None] | None = None  # of what was handed over; each waits for the one before
        self._last_bucket: Callable[[], None] | None = None

    def compare(self, layout_hash: int, specs: Sequence[Spec]) -> None:
        """Before a group's first gradients: all ranks must train the same parameters on the same terms."""

        def compare() -> None:
            with self._inspected(range(len(self._names))):
                agree(self._group, layout_hash, specs, self._terms)

        self._submit(compare)

    def send(self, number: int) -> None:
        """Sum a bucket, which is complete. The last one of the layout waits for `reduce_last`."""
        fusion, group = self._fusion, self._group
        fusion.send(number)
        array, dtype = fusion.array(number), fusion.buckets[number].dtype
        wire = self._terms.wire if dtype == "float32" else None
        own, scale = self._terms.compressor, self._terms.factors(group.size)
        complete = self._clock.now()

        def reduce() -> None:
            fusion.ready(number)
            begin = self._clock.now()
            with self._inspected([part.index for part in fusion.buckets[number].slices]):
                if own is None:
                    group.allreduce(array, dtype=dtype, scale=scale, compression=wire)
                else:
                    allreduce_as(own, group, fusion.gradients(number), scale)
            if self._timeline is not None:
                self._timeline.gradients(
                    f"gradients {number}", array.nbytes, complete, begin, self._clock.now()
                )

        if number + 1 < len(fusion.buckets):
            self._submit(reduce)
        else:
            self._last_bucket = reduce

    def reduce_last(self) -> None:
        """Sum the last bucket in this thread, once all others are through."""
        if self._last_bucket is not None:
            self.wait()
            self._engine.run(self._last_bucket)

    def gather(self, index: int, gradient: torch.Tensor) -> None:
        """Sum the sparse gradient of a parameter, which lies in no bucket, into `rows`."""
        factor = float(np.prod(self._terms.factors(self._group.size)))

        def gather() -> None:
            with self._inspected([index]):
                self.rows[index] = sparse.summed(self._group, gradient, factor)

        self._submit(gather)

    def wait(self) -> None:
        """Until everything that was handed over is through; raises what broke it."""
        if self._newest is not None:
            self._newest.result()

    def drain(self) -> None:
        """Until everything that was handed over is through, or broke."""
        if self._newest is not None:
            self._newest.exception()

    def _inspected(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        terms = self._terms
        return inspected(
            self._group, lambda: [self._names[i] for i in indices], terms.warn_after, terms.wait_at_most
        )

    def _submit(self, work: Callable[[], None]) -> None:
        before = self._newest

        def next_one() -> None:
            if before is not None:
                before.result()
            work()

        self._newest = self._engine.submit(next_one)
