"""The collectives of one step's gradients: in the same order on all ranks (R7), on the engine's thread.

The last bucket is the exception. Nothing is left that its sum could overlap with, so the training thread makes it. The
training thread owns everything here; the engine's thread runs only what it is handed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.reduction import Compressor
from spark_elastic.ops.stall import watch_collective
from spark_elastic.ops.timeline import Timeline
from spark_elastic.torch.gradients.buckets import Bucket, Spec
from spark_elastic.torch.gradients.exchange_options import ExchangeOptions
from spark_elastic.torch.tensors import array_of, name_of, to_host, warn_about_gpus
from spark_elastic.worker.context import EngineThread

# Whether all ranks train the same parameters on the same terms, and what the first difference is.
#
# Before any gradient travels (R7). Runs in the engine's thread; knows no tensors.


def check_agreement(group: Group, layout: int, specs: Sequence[Spec], terms: ExchangeOptions) -> None:
    """A collective of all ranks. layout: a hash of everything that must be equal.

    Raises:
        MismatchError: it is not, on every rank alike.
    """
    hashes = group.allgather(np.array(layout, np.uint64)).tolist()
    off = [rank for rank, cut in enumerate(hashes) if cut != hashes[0]]
    if off:
        own = json.dumps(describe(specs, terms)).encode()
        texts = [json.loads(text) for text in group.allgather_bytes(own)]
        raise MismatchError(
            off,
            f"ranks {off} do not exchange the same gradients as rank 0: "
            + first_difference(texts[0], texts[off[0]], off[0]),
        )


def describe(specs: Sequence[Spec], terms: ExchangeOptions) -> list[str]:
    """The terms, and each parameter in the order of the optimizer."""
    own = f"gradients are {terms.description}, in {len(terms.groups)} groups"
    return [own, *(f"{spec.name!r} is {spec.dtype} of shape {spec.shape}" for spec in specs)]


def first_difference(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    """One sentence, of what rank 0 and that rank said of themselves."""
    for number, (a, b) in enumerate(zip_longest(first, other, fillvalue="no more")):
        if a != b:
            what = (
                f"of {max(len(first), len(other)) - 1} parameters, the first that differs, number {number}: "
            )
            return f"{what if number else ''}on rank 0, {a}; on rank {rank}, {b}."
    return "their buckets are cut differently: set SPARK_ELASTIC_BUCKET_BYTES and groups alike."


# Gradients that travel as a user's own `Compressor` says. Knows no buckets; runs where these are reduced: in the
# engine's thread, and for the last one in the training thread.


def allreduce_compressed(
    compressor: type[Compressor], group: Group, tensors: Iterable[torch.Tensor], scale: tuple[float, float]
) -> None:
    """Sum each tensor, in place, by way of what the compressor makes of it; scale: factors before and after the sum.

    Raises:
        InvalidInput: what it gives back has another shape than the tensor.
    """
    for tensor in tensors:
        compressed, ctx = compressor.compress(tensor)
        sent = to_host(compressed)
        group.allreduce(array_of(sent), dtype=name_of(sent.dtype), scale=scale)
        result = compressor.decompress(sent, ctx)
        if result.shape != tensor.shape:
            raise InvalidInput(
                f"{compressor.__name__}.decompress must give back the shape that compress was given, "
                f"{tuple(tensor.shape)}; got {tuple(result.shape)}."
            )
        tensor.copy_(result)


# Sparse gradients (of embeddings with sparse=True) summed over the ranks: indices and values are gathered.
#
# Sums are made of all ranks' values in rank order, alike on all of them. Engine's thread; owns nothing.


def coalesce_rows(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` with its rows listed once.

    Raises:
        InvalidInput: more than its first dimension is sparse.
    """
    if not gradient.is_sparse:
        return gradient.detach().to_sparse(1)
    if gradient.sparse_dim() != 1:
        raise InvalidInput(
            f"the gradient of parameter {name!r} is sparse in {gradient.sparse_dim()} dimensions: only whole rows may "
            "be missing; pass sparse_as_dense=True."
        )
    return gradient.detach().coalesce()


def allreduce_rows(group: Group, own: torch.Tensor, factor: float) -> torch.Tensor:
    """The sum of all ranks' gradients, times `factor`; the rows that any of them has, each once."""
    rows = np.concatenate(group.allgatherv(own.indices()[0].cpu().numpy()))
    values = np.concatenate(group.allgatherv(_array(own.values())))
    flat = torch.from_numpy(values)
    flat = flat.view(torch.bfloat16) if own.dtype == torch.bfloat16 else flat
    scaled = flat if factor == 1.0 else flat * factor
    listed = torch.sparse_coo_tensor(torch.from_numpy(rows)[None], scaled, own.shape, check_invariants=False)
    return listed.coalesce().to(own.device)


def _array(values: torch.Tensor) -> npt.NDArray[Any]:
    dense = values.cpu().contiguous()
    return (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()


class Dispatch:
    """Hands the buckets and sparse gradients of one step to the engine's thread. After a failure the rest fails, too.

    rows: the sums of the sparse gradients by number of parameter, complete after `wait`.
    """

    def __init__(
        self,
        fusion: Fusion,
        names: Sequence[str],
        terms: ExchangeOptions,
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
            with self._stall_check(range(len(self._names))):
                check_agreement(self._group, layout_hash, specs, self._terms)

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
            with self._stall_check([part.index for part in fusion.buckets[number].slices]):
                if own is None:
                    group.allreduce(array, dtype=dtype, scale=scale, compression=wire)
                else:
                    allreduce_compressed(own, group, fusion.gradients(number), scale)
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
            with self._stall_check([index]):
                self.rows[index] = allreduce_rows(self._group, gradient, factor)

        self._submit(gather)

    def wait(self) -> None:
        """Until everything that was handed over is through; raises what broke it."""
        if self._newest is not None:
            self._newest.result()

    def drain(self) -> None:
        """Until everything that was handed over is through, or broke."""
        if self._newest is not None:
            self._newest.exception()

    def _stall_check(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        terms = self._terms
        return watch_collective(
            self._group, lambda: [self._names[i] for i in indices], terms.warn_after, terms.wait_at_most
        )

    def _submit(self, work: Callable[[], None]) -> None:
        before = self._newest

        def next_one() -> None:
            if before is not None:
                before.result()
            work()

        self._newest = self._engine.submit(next_one)


# The memory of gradients: flat buckets in the group's shared memory, and in them a view for each gradient.
#
# What lies there is reduced where it is, without a copy in or out. The memory belongs to one group: the next one's
# first
# step makes another `Fusion`, and until then nobody but the gradients looks at it. Gradients of a GPU lie in buckets
# there, which pass through pinned memory. Training thread only, except `ready`.


class Fusion:
    """Flat buckets in one piece of memory. views: one for each parameter; None: it lies in no bucket."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], buckets: Sequence[Bucket], group: Group
    ) -> None:
        """All ranks of `group` call it at the same place among their collectives."""
        self.buckets = buckets
        self.group = group
        self.views: list[torch.Tensor | None] = [None] * len(parameters)
        self.bucket_of = [-1] * len(parameters)
        self._shapes = [parameter.shape for parameter in parameters]
        self._flat: list[torch.Tensor] = []
        self._staging: dict[int, _Staging] = {}
        ends = np.cumsum([0, *(b.numel * getattr(torch, b.dtype).itemsize for b in buckets)]).tolist()
        self._memory = group.buffer(ends[-1])
        for number, bucket in enumerate(buckets):
            self._flat.append(self._allocate(number, bucket, ends[number : number + 2], parameters))
            for part in bucket.slices:
                view = self._flat[number][part.offset : part.offset + part.numel]
                self.views[part.index] = view.view(self._shapes[part.index])
                self.bucket_of[part.index] = number

    def array(self, number: int) -> npt.NDArray[Any]:
        """A bucket as the engine takes it; bfloat16 as uint16."""
        flat = self._on_host(number)
        return (flat.view(torch.uint16) if flat.dtype == torch.bfloat16 else flat).numpy()

    def gradients(self, number: int) -> list[torch.Tensor]:
        """The gradients of a bucket, each in its shape, as views of the memory of `array`."""
        # Not the tensor itself: what the engine's thread writes is no change that `version` should count.
        flat = self._on_host(number).data
        parts = self.buckets[number].slices
        return [flat[part.offset : part.offset + part.numel].view(self._shapes[part.index]) for part in parts]

    def version(self, number: int) -> int:
        """Grows with every change of a bucket in place by torch; all gradients in it share that count."""
        return self._flat[number]._version

    def send(self, number: int) -> None:
        """The bucket is complete: begin to bring it to where `array` is."""
        if number in self._staging:
            self._staging[number].send(self._flat[number])

    def ready(self, number: int) -> None:
        """Wait until `send` is through. Called by the engine's thread."""
        if number in self._staging:
            self._staging[number].sent.synchronize()

    def receive(self) -> None:
        """Bring all buckets back to where the gradients are."""
        for number, staging in self._staging.items():
            self._flat[number].copy_(staging.host, non_blocking=True)

    @staticmethod
    def holds(parameter: torch.nn.Parameter, view: torch.Tensor | None) -> bool:
        """Whether the parameter's gradient is that view."""
        return view is not None and parameter.grad is view

    def hand_over(self, parameters: Sequence[torch.nn.Parameter], heir: Fusion | None) -> None:
        """Gradients that lie here come to lie in the heir's buckets, or in memory of their own."""
        places = [None] * len(parameters) if heir is None else heir.views
        for parameter, was, view in zip(parameters, self.views, places, strict=True):
            if was is not None and self.holds(parameter, was):
                parameter.grad = was.clone() if view is None else view.copy_(was)

    def _on_host(self, number: int) -> torch.Tensor:
        staging = self._staging.get(number)
        return self._flat[number] if staging is None else staging.host

    def _allocate(
        self, number: int, bucket: Bucket, span: list[int], parameters: Sequence[torch.nn.Parameter]
    ) -> torch.Tensor:
        dtype = getattr(torch, bucket.dtype)
        device = parameters[bucket.slices[0].index].device
        if device.type == "cpu":
            return torch.from_numpy(self._memory[span[0] : span[1]]).view(dtype)
        warn_about_gpus()
        flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        self._staging[number] = _Staging(flat)
        return flat


class _Staging:
    """A bucket of a GPU on its way through pinned memory."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, flat: torch.Tensor) -> None:
        self.host.copy_(flat, non_blocking=True)
        self.sent.record(torch.cuda.current_stream(flat.device))
