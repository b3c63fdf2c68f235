"""The engine's collectives that sum the gradients of a step: in the same order on all ranks (R7, layout).

The training thread owns everything here; the group's `CollectiveThread` runs the collectives, except that of the last
bucket: no backward is left to overlap with it, so the training thread runs it itself.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import torch

from elastic_collectives import Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import HostCopy
from spark_elastic.gradients.host_memory import array_of, get_dtype_name, to_host
from spark_elastic.gradients.layout import BucketMemory, GradientLayout, cut_views
from spark_elastic.gradients.reduction import Compressor, ExchangeOptions
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread

T = TypeVar("T")

NAMED = 3  # parameters that a line of the log names at most
log = logging.getLogger(__name__)


class StepReducer:
    """Sums the buckets and sparse gradients of one step in the `CollectiveThread`. The `launch_...` methods return at
    once; `wait` waits for all. After a failure the rest fails."""

    def __init__(
        self,
        layout: GradientLayout,
        memory: BucketMemory,
        group: Group,
        thread: CollectiveThread,
        timeline: Timeline | None,
    ) -> None:
        self.sparse_results: dict[int, torch.Tensor] = {}  # after `wait`, by parameter: of `launch_sparse`
        self._layout = layout
        self._options = layout.options
        self._memory = memory
        self._group = group
        self._thread = thread
        self._timeline = timeline
        self._clock = SystemClock()
        self._newest: Future[None] | None = None  # of the newest work, which waits for the one before
        self._last_bucket: tuple[Callable[[], None], list[int]] | None = None  # its sum, and its parameters
        self._copies: list[tuple[torch.Tensor, HostCopy]] = []  # each launched bucket, and where it is summed

    def compare(self) -> None:
        """`check_agreement`, before the engine sums any gradient. What the bulk plane sums meanwhile counts only if the
        check succeeds."""
        self._submit(lambda: check_agreement(self._group, self._layout))

    def launch_bucket(self, number: int) -> None:
        """Sum a complete bucket. The last one of the layout waits for `reduce_last_bucket`."""
        group, bucket, flat = self._group, self._memory.buckets[number], self._memory.flats[number]
        array, copy = self._memory.arrays[number], HostCopy([flat])
        self._copies.append((flat, copy))
        wire = self._options.wire if bucket.dtype == "float32" else None
        compressor, scale = self._options.compressor, self._options.factors(group.size)
        complete = self._clock.now()

        def reduce() -> None:
            host = copy.wait()[0].data  # so that no change counts as one of the user's
            begin = self._clock.now()
            if compressor is None:
                summed = array_of(host) if array is None else array
                group.allreduce(summed, dtype=bucket.dtype, scale=scale, compression=wire)
            else:
                views = cut_views(self._layout.parameters, [bucket], [host])
                gradients = [view for view in views if view is not None]
                allreduce_compressed(compressor, group, gradients, scale)
            self._memory.combine(host)
            if self._timeline is not None:
                name = f"gradients {number}"
                self._timeline.write_gradients(name, host.nbytes, complete, begin, self._clock.now())

        parameters = [part.index for part in bucket.slices]
        if number + 1 < len(self._memory.buckets):
            self._submit(reduce, parameters)
        else:
            self._last_bucket = reduce, parameters

    def reduce_last_bucket(self) -> None:
        """Sum the last bucket in this thread, after all others."""
        if self._last_bucket is not None:
            self.call(*self._last_bucket)

    def launch_sparse(self, index: int, rows: torch.Tensor) -> None:
        """Sum a parameter's sparse gradient, which lies in no bucket, into `sparse_results`: in rank order, so that it
        has the same bits on every rank. rows: may list one several times."""
        factor = float(np.prod(self._options.factors(self._group.size)))

        def reduce() -> None:
            listed = gather_listed_rows(self._group, rows, factor)
            self.sparse_results[index] = listed.coalesce().to(rows.device)

        self._submit(reduce, [index])

    def call(self, collective: Callable[[], T], parameters: Sequence[int] | None = None) -> T:
        """Call a collective in this thread, after all work. parameters: as for `_submit`."""
        self.wait()
        with self._watch(parameters):
            return self._thread.drain_and_call(collective)

    def wait(self) -> None:
        """Wait for all work. Raises the error of the first work that failed."""
        if self._newest is not None:
            self._newest.result()

    def complete_buckets(self) -> None:
        self.wait()
        for flat, copy in self._copies:
            (host,) = copy.wait()
            if host is not flat:
                flat.copy_(host, non_blocking=True)

    def drain(self) -> None:
        if self._newest is not None:
            self._newest.exception()

    def _submit(self, work: Callable[[], None], parameters: Sequence[int] | None = None) -> None:
        """parameters: numbers of those whose gradients the work sums, for the stall check; None: all."""
        before = self._newest

        def next_one() -> None:
            if before is not None:
                before.result()
            with self._watch(parameters):
                work()

        self._newest = self._thread.submit(next_one)

    def _watch(self, parameters: Sequence[int] | None) -> StallCheck:
        names = self._layout.names
        which = range(len(names)) if parameters is None else parameters
        return StallCheck(self._group, lambda: [names[i] for i in which], self._options)


def check_agreement(group: Group, layout: GradientLayout) -> None:
    """Raise MismatchError, on every rank alike, unless all ranks train the same parameters with the same options. A
    collective."""
    hashes = group.allgather(np.array(layout.hash, np.uint64)).tolist()
    off = [rank for rank, its_hash in enumerate(hashes) if its_hash != hashes[0]]
    if off:
        texts = [json.loads(text) for text in group.allgather_bytes(json.dumps(describe(layout)).encode())]
        difference = first_difference(texts[0], texts[off[0]], off[0])
        raise MismatchError(off, f"ranks {off} do not exchange the same gradients as rank 0: {difference}")


def describe(layout: GradientLayout) -> list[str]:
    """Return one line for the options, and one for each parameter in the order of the optimizer."""
    own = f"gradients are {layout.options.description}, in {len(layout.options.groups)} groups"
    return [own, *(f"{spec.name!r} is {spec.dtype} of shape {spec.shape}" for spec in layout.specs)]


def first_difference(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    for number, (a, b) in enumerate(zip_longest(first, other, fillvalue="no more")):
        if a != b:
            count = max(len(first), len(other)) - 1
            where = f"of {count} parameters, the first that differs, number {number}: " if number else ""
            return f"{where}on rank 0, {a}; on rank {rank}, {b}."
    return "their buckets are cut differently: set SPARK_ELASTIC_BUCKET_BYTES and groups alike."


def allreduce_compressed(
    compressor: type[Compressor], group: Group, tensors: Iterable[torch.Tensor], scale: tuple[float, float]
) -> None:
    """Sum each tensor in place; what the user's compressor makes of it travels. scale: factors before and after."""
    for tensor in tensors:
        compressed, ctx = compressor.compress(tensor)
        sent = to_host(compressed)
        group.allreduce(array_of(sent), dtype=get_dtype_name(sent.dtype), scale=scale)
        result = compressor.decompress(sent, ctx)
        if result.shape != tensor.shape:
            raise InvalidInput(
                f"{compressor.__name__}.decompress must give back the shape that compress was given, "
                f"{tuple(tensor.shape)}; got {tuple(result.shape)}."
            )
        tensor.copy_(result)


def coalesce_rows(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient with each of its rows listed once; more than its first dimension must not be sparse."""
    if not gradient.is_sparse:
        return gradient.detach().to_sparse(1)
    if gradient.sparse_dim() != 1:
        raise InvalidInput(
            f"the gradient of parameter {name!r} is sparse in {gradient.sparse_dim()} dimensions: only whole rows may "
            "be missing; pass sparse_as_dense=True."
        )
    return gradient.detach().coalesce()


def gather_listed_rows(group: Group, own: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the rows that all ranks' sparse gradients list, times `factor`, in rank order, on the host; a row may come
    several times."""
    rows = np.concatenate(group.allgatherv(own._indices()[0].cpu().numpy()))
    flat = torch.from_numpy(np.concatenate(group.allgatherv(array_of(own._values().cpu().contiguous()))))
    flat = flat.view(torch.bfloat16) if own.dtype == torch.bfloat16 else flat
    values = flat if factor == 1.0 else flat * factor
    return torch.sparse_coo_tensor(torch.from_numpy(rows)[None], values, own.shape, check_invariants=False)


class StallCheck:
    """Horovod's stall check of a collective: a warning names the ranks that it waits for, and a wait may have a limit.
    To be entered in the thread that calls the collective, for one after the other; each step does."""

    def __init__(self, group: Group, names: Callable[[], Sequence[str]], options: ExchangeOptions) -> None:
        """names: of the parameters whose gradients the collective sums."""
        self._group, self._names = group, names
        self._warn_after, self._wait_at_most = options.warn_after, options.wait_at_most
        self._watches = options.warn_after != math.inf or options.wait_at_most is not None

    def __enter__(self) -> None:
        if self._watches:
            self._warned_after = 0.0
            self._group.watch(self._warn)
            if self._wait_at_most is not None:
                self._group.set_timeout(self._wait_at_most)

    def __exit__(self, *error: object) -> None:
        if self._watches:
            self._group.watch(None)
            if self._wait_at_most is not None:
                self._group.set_timeout(self._group.timeout)

    def _warn(self, seconds: float, ranks: Sequence[int]) -> None:
        if seconds - self._warned_after >= self._warn_after:
            self._warned_after = seconds
            missing = ", ".join(str(self._group.members[rank]) for rank in ranks)
            log.warning(
                "gradients of %s have been waiting for %.0f s for rank(s) %s, which have not sent theirs.",
                *(_format_names(self._names()), seconds, missing),
            )


def _format_names(names: Sequence[str]) -> str:
    some = ", ".join(map(repr, names[:NAMED]))
    return some if len(names) <= NAMED else f"{some} and {len(names) - NAMED} more"
