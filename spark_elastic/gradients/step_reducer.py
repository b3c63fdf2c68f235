"""The memory of gradient buckets, and the collectives that sum them: in the same order on all ranks (R7, layout).

Buckets hold a view for each gradient. Those on the CPU lie in the group's shared memory: the engine sums them where
they are, without a copy in or out. Those on a GPU are summed there by the bulk plane, or pass through pinned memory.
The training thread owns everything here; the group's `CollectiveThread` runs the engine's collectives, except that of
the last bucket: no backward is left to overlap with it, so the training thread runs it itself.
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
from spark_elastic.gradients.buckets import Bucket, ParameterSpec
from spark_elastic.gradients.bulk_plane import BulkPlane, BulkStep
from spark_elastic.gradients.devices import get_device_module
from spark_elastic.gradients.exchange_options import ExchangeOptions
from spark_elastic.gradients.flat_allreduce import allocate_aligned
from spark_elastic.gradients.reduction import Compressor
from spark_elastic.gradients.stall import watch_collective
from spark_elastic.gradients.tensors import array_of, get_dtype_name, to_host, warn_about_gpus
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread


class BucketMemory:
    """Flat buckets in one piece of memory of one group. The first step of the next group makes another one."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], buckets: Sequence[Bucket], group: Group | None
    ) -> None:
        """All ranks of `group` must call it at the same place among their collectives.

        Args:
            group: None: memory of this process alone.
        """
        self.buckets = buckets
        self.group = group
        self.views: list[torch.Tensor | None] = [None] * len(
            parameters
        )  # by parameter; None: it lies in no bucket
        self.bucket_of = [-1] * len(parameters)  # by parameter: the number of its bucket
        self._shapes = [parameter.shape for parameter in parameters]
        self._flat: list[torch.Tensor] = []  # by bucket
        self._staging: dict[int, _Staging] = {}  # of buckets on a GPU
        devices = [parameters[bucket.slices[0].index].device for bucket in buckets]
        sizes = [
            bucket.numel * getattr(torch, bucket.dtype).itemsize if device.type == "cpu" else 0
            for bucket, device in zip(buckets, devices, strict=True)
        ]
        ends = np.cumsum([0, *sizes]).tolist()
        self._memory = allocate_aligned(ends[-1]) if group is None else group.buffer(ends[-1])
        for number, bucket in enumerate(buckets):
            self._flat.append(self._allocate(number, bucket, devices[number], ends[number : number + 2]))
            for part in bucket.slices:
                view = self._flat[number][part.offset : part.offset + part.numel]
                self.views[part.index] = view.view(self._shapes[part.index])
                self.bucket_of[part.index] = number

    def array(self, number: int) -> npt.NDArray[Any]:
        """Return a bucket as the array that the engine takes; bfloat16 as uint16."""
        return array_of(self._on_host(number))

    def gradients(self, number: int) -> list[torch.Tensor]:
        """Return the gradients of a bucket, each in its shape, as views of the memory of `array`."""
        # `.data`, so that `write_count` does not count what the `CollectiveThread` writes.
        flat = self._on_host(number).data
        parts = self.buckets[number].slices
        return [flat[part.offset : part.offset + part.numel].view(self._shapes[part.index]) for part in parts]

    def write_count(self, number: int) -> int:
        """Return a count that grows with every change in place by torch of any gradient in the bucket."""
        return self._flat[number]._version

    def flat(self, number: int) -> torch.Tensor:
        """Return a bucket where its gradients are."""
        return self._flat[number]

    def copy_to_host(self, number: int) -> None:
        """Start to copy a complete bucket to where `array` is; one that lies there already is not copied."""
        if number in self._staging:
            self._staging[number].copy_to_host(self._flat[number])

    def wait_copied(self, number: int) -> None:
        """Wait until the copy of `copy_to_host` is complete. Called by the `CollectiveThread`."""
        if number in self._staging:
            self._staging[number].copied.synchronize()

    def copy_from_host(self, number: int) -> None:
        """Start to copy a bucket back to where its gradients are."""
        if number in self._staging:
            self._flat[number].copy_(self._staging[number].host, non_blocking=True)

    def combine(self, number: int) -> None:
        """Complete a bucket once it is summed over all ranks. Called by the thread that summed it."""

    def hand_over(self, parameters: Sequence[torch.nn.Parameter], successor: BucketMemory | None) -> None:
        """Move the gradients that lie here into the buckets of the successor, or into memory of their own."""
        targets = [None] * len(parameters) if successor is None else successor.views
        for parameter, view, target in zip(parameters, self.views, targets, strict=True):
            if view is not None and parameter.grad is view:
                parameter.grad = view.clone() if target is None else target.copy_(view)

    def _on_host(self, number: int) -> torch.Tensor:
        staging = self._staging.get(number)
        return self._flat[number] if staging is None else staging.host

    def _allocate(self, number: int, bucket: Bucket, device: torch.device, span: list[int]) -> torch.Tensor:
        dtype = getattr(torch, bucket.dtype)
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
        self.copied = get_device_module(flat.device).Event()

    def copy_to_host(self, flat: torch.Tensor) -> None:
        self.host.copy_(flat, non_blocking=True)
        self.copied.record(get_device_module(flat.device).current_stream())


class StepReducer:
    """Sums the buckets and sparse gradients of one step in the `CollectiveThread`.

    The `launch_...` methods return at once; `wait` waits for all. After a failure the rest fails.
    """

    def __init__(
        self,
        memory: BucketMemory,
        names: Sequence[str],
        options: ExchangeOptions,
        thread: CollectiveThread,
        timeline: Timeline | None,
        plane: BulkPlane | None = None,
    ) -> None:
        """
        Args:
            names: of all parameters, for messages.
            timeline: where to write the exchanges.
            plane: sums the buckets on its device; the engine sums all others, in memory of the host.
        """
        # After `wait`, by number of parameter: what `launch_sparse` summed or `launch_gather` gathered.
        self.sparse_results: dict[int, torch.Tensor] = {}
        assert memory.group is not None
        self._memory = memory
        self._group = memory.group
        self._names = names
        self._options = options
        self._thread = thread
        self._timeline = timeline
        self._clock = SystemClock()
        self._newest: Future[None] | None = None  # of the newest work, which waits for the one before
        self._last_bucket: Callable[[], None] | None = None
        self._plane = plane
        self._bulk = None if plane is None else BulkStep(plane, memory.group, options)
        self._through_host: list[int] = []  # numbers of the buckets that the engine sums

    def compare(self, layout_hash: int, specs: Sequence[ParameterSpec]) -> None:
        """Check that all ranks train the same parameters with the same options, before the engine sums any gradient.

        What the bulk plane sums meanwhile counts only if the check succeeds.
        """

        def compare() -> None:
            with self._watch(range(len(self._names))):
                check_agreement(self._group, layout_hash, specs, self._options)

        self._submit(compare)

    def launch_bucket(self, number: int) -> None:
        """Sum a complete bucket. The last one of the layout waits for `reduce_last_bucket`."""
        memory, group = self._memory, self._group
        flat = memory.flat(number)
        if self._bulk is not None and self._plane is not None and flat.device == self._plane.device:
            self._bulk.launch(flat)
            return
        self._through_host.append(number)
        memory.copy_to_host(number)
        array, dtype = memory.array(number), memory.buckets[number].dtype
        wire = self._options.wire if dtype == "float32" else None
        compressor, scale = self._options.compressor, self._options.factors(group.size)
        complete = self._clock.now()

        def reduce() -> None:
            memory.wait_copied(number)
            begin = self._clock.now()
            with self._watch([part.index for part in memory.buckets[number].slices]):
                if compressor is None:
                    group.allreduce(array, dtype=dtype, scale=scale, compression=wire)
                else:
                    allreduce_compressed(compressor, group, memory.gradients(number), scale)
                memory.combine(number)
            if self._timeline is not None:
                self._timeline.write_gradients(
                    f"gradients {number}", array.nbytes, complete, begin, self._clock.now()
                )

        if number + 1 < len(memory.buckets):
            self._submit(reduce)
        else:
            self._last_bucket = reduce

    def reduce_last_bucket(self) -> None:
        """Sum the last bucket in this thread, after all others."""
        if self._last_bucket is not None:
            self.wait()
            self._thread.drain_and_call(self._last_bucket)

    def launch_sparse(self, index: int, gradient: torch.Tensor) -> None:
        """Sum the sparse gradient of a parameter, which lies in no bucket, into `sparse_results`."""
        factor = float(np.prod(self._options.factors(self._group.size)))

        def reduce() -> None:
            with self._watch([index]):
                self.sparse_results[index] = allreduce_rows(self._group, gradient, factor)

        self._submit(reduce)

    def launch_gather(self, index: int, listed: torch.Tensor) -> None:
        """Gather the listed rows of a parameter, in rank order, into `sparse_results`."""

        def gather() -> None:
            with self._watch([index]):
                self.sparse_results[index] = gather_listed_rows(self._group, listed)

        self._submit(gather)

    def reduce_any(self, flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which flags are set on any rank. Waits for this and for all work before it."""
        reduced: list[npt.NDArray[np.bool_]] = []

        def reduce() -> None:
            with self._watch(()):
                reduced.append(np.bitwise_or.reduce(self._group.allgather(flags)))

        self._submit(reduce)
        self.wait()
        return reduced[0]

    def wait(self) -> None:
        """Wait for all work. Raises the error of the first work that failed."""
        if self._newest is not None:
            self._newest.result()

    def complete_buckets(self) -> None:
        """Wait for the sums of all buckets, and have them where the gradients are."""
        self.wait()
        for number in self._through_host:
            self._memory.copy_from_host(number)
        if self._bulk is not None:
            with self._watch(range(len(self._names))):
                self._thread.drain_and_call(self._bulk.finish)

    def drain(self) -> None:
        """Wait until all work is done or has failed."""
        if self._newest is not None:
            self._newest.exception()
        if self._bulk is not None:
            self._bulk.abandon("a step was given up in the middle of its exchange")

    def _watch(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        options = self._options
        return watch_collective(
            self._group, lambda: [self._names[i] for i in indices], options.warn_after, options.wait_at_most
        )

    def _submit(self, work: Callable[[], None]) -> None:
        before = self._newest

        def next_one() -> None:
            if before is not None:
                before.result()
            work()

        self._newest = self._thread.submit(next_one)


def check_agreement(
    group: Group, layout_hash: int, specs: Sequence[ParameterSpec], options: ExchangeOptions
) -> None:
    """Check that all ranks train the same parameters with the same options. A collective of all ranks.

    Args:
        layout_hash: of everything that must be equal.

    Raises:
        MismatchError: it differs; every rank raises the same error.
    """
    hashes = group.allgather(np.array(layout_hash, np.uint64)).tolist()
    off = [rank for rank, its_hash in enumerate(hashes) if its_hash != hashes[0]]
    if off:
        own = json.dumps(describe(specs, options)).encode()
        texts = [json.loads(text) for text in group.allgather_bytes(own)]
        raise MismatchError(
            off,
            f"ranks {off} do not exchange the same gradients as rank 0: "
            + first_difference(texts[0], texts[off[0]], off[0]),
        )


def describe(specs: Sequence[ParameterSpec], options: ExchangeOptions) -> list[str]:
    """Return one line for the options, and one for each parameter in the order of the optimizer."""
    own = f"gradients are {options.description}, in {len(options.groups)} groups"
    return [own, *(f"{spec.name!r} is {spec.dtype} of shape {spec.shape}" for spec in specs)]


def first_difference(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    """Return a sentence with the first line in which rank 0 and that rank differ."""
    for number, (a, b) in enumerate(zip_longest(first, other, fillvalue="no more")):
        if a != b:
            what = (
                f"of {max(len(first), len(other)) - 1} parameters, the first that differs, number {number}: "
            )
            return f"{what if number else ''}on rank 0, {a}; on rank {rank}, {b}."
    return "their buckets are cut differently: set SPARK_ELASTIC_BUCKET_BYTES and groups alike."


def allreduce_compressed(
    compressor: type[Compressor], group: Group, tensors: Iterable[torch.Tensor], scale: tuple[float, float]
) -> None:
    """Sum each tensor in place; what the user's compressor makes of it travels.

    Args:
        scale: factors before and after the sum.

    Raises:
        InvalidInput: `decompress` returned another shape than that of the tensor.
    """
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
    """Return a sparse gradient with each of its rows listed once.

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
    """Return the sum of all ranks' sparse gradients, times `factor`, in rank order: the same bits on every rank."""
    return gather_listed_rows(group, own, factor).coalesce().to(own.device)


def gather_listed_rows(group: Group, own: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return the rows that all ranks' sparse gradients list, times `factor`, in rank order, on the host; a row may come
    several times."""
    rows = np.concatenate(group.allgatherv(own._indices()[0].cpu().numpy()))
    flat = torch.from_numpy(np.concatenate(group.allgatherv(_array(own._values()))))
    flat = flat.view(torch.bfloat16) if own.dtype == torch.bfloat16 else flat
    values = flat if factor == 1.0 else flat * factor
    return torch.sparse_coo_tensor(torch.from_numpy(rows)[None], values, own.shape, check_invariants=False)


def _array(values: torch.Tensor) -> npt.NDArray[Any]:
    return array_of(values.cpu().contiguous())
