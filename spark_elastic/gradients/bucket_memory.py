"""The memory of gradient buckets, with a view for each gradient.

Buckets on the CPU lie in the group's shared memory: the engine sums them where they are, without a copy in or out.
Those on a GPU lie there, beside pinned memory of the host for sums that the bulk plane does not carry. The training
thread owns everything here, except where a method names the `CollectiveThread`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.gradients.buckets import Bucket
from spark_elastic.gradients.devices import get_device_module
from spark_elastic.gradients.flat_allreduce import allocate_aligned
from spark_elastic.gradients.host_memory import array_of, warn_about_gpus

Views = list[torch.Tensor | None]  # by parameter; None: it lies in no bucket


def cut_views(
    parameters: Sequence[torch.nn.Parameter], buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]
) -> Views:
    """Return the place of each parameter's gradient. flats: memory of the buckets."""
    views: Views = [None] * len(parameters)
    for bucket, flat in zip(buckets, flats, strict=True):
        for part in bucket.slices:
            place = flat[part.offset : part.offset + part.numel]
            views[part.index] = place.view(parameters[part.index].shape)
    return views


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
        # By number of the parameter: the number of its bucket.
        self.bucket_of = {
            part.index: number for number, bucket in enumerate(buckets) for part in bucket.slices
        }
        self._shapes = [parameter.shape for parameter in parameters]
        self._staging: dict[int, _Staging] = {}  # of buckets on a GPU
        devices = [parameters[bucket.slices[0].index].device for bucket in buckets]
        sizes = [
            bucket.numel * getattr(torch, bucket.dtype).itemsize if device.type == "cpu" else 0
            for bucket, device in zip(buckets, devices, strict=True)
        ]
        ends = np.cumsum([0, *sizes]).tolist()
        self._memory = allocate_aligned(ends[-1]) if group is None else group.buffer(ends[-1])
        # By bucket: its gradients, where they are. The `_version` of each grows with every change of one in place.
        self.flats = [
            self._allocate(number, bucket, devices[number], ends[number : number + 2])
            for number, bucket in enumerate(buckets)
        ]
        self.views = cut_views(parameters, buckets, self.flats)

    def array(self, number: int) -> npt.NDArray[Any]:
        """Return a bucket as the array that the engine takes; bfloat16 as uint16."""
        return array_of(self._on_host(number))

    def gradients(self, number: int) -> list[torch.Tensor]:
        """Return the gradients of a bucket, each in its shape, as views of the memory of `array`."""
        # `.data`, so that `_version` does not count what the `CollectiveThread` writes.
        flat = self._on_host(number).data
        parts = self.buckets[number].slices
        return [flat[part.offset : part.offset + part.numel].view(self._shapes[part.index]) for part in parts]

    def copy_to_host(self, number: int) -> None:
        """Start to copy a complete bucket to where `array` is; one that lies there already is not copied."""
        if number in self._staging:
            self._staging[number].copy_to_host(self.flats[number])

    def wait_copied(self, number: int) -> None:
        """Wait until the copy of `copy_to_host` is complete. Called by the `CollectiveThread`."""
        if number in self._staging:
            self._staging[number].copied.synchronize()

    def copy_from_host(self, number: int) -> None:
        """Start to copy a bucket back to where its gradients are."""
        if number in self._staging:
            self.flats[number].copy_(self._staging[number].host, non_blocking=True)

    def combine(self, number: int) -> None:
        """Complete a bucket once it is summed over all ranks. Called by the thread that summed it."""

    def _on_host(self, number: int) -> torch.Tensor:
        staging = self._staging.get(number)
        return self.flats[number] if staging is None else staging.host

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
