"""The memory of gradient buckets, with a view for each gradient.

Buckets on the CPU lie in the group's shared memory: the engine sums them where they are, without a copy in or out.
Those on a GPU lie there. The training thread owns everything here, except where a method names another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from elastic_collectives import Group
from spark_elastic.gradients.buckets import Bucket
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
        devices = [parameters[bucket.slices[0].index].device for bucket in buckets]
        sizes = [
            bucket.numel * getattr(torch, bucket.dtype).itemsize if device.type == "cpu" else 0
            for bucket, device in zip(buckets, devices, strict=True)
        ]
        ends = np.cumsum([0, *sizes]).tolist()
        self._memory = allocate_aligned(ends[-1]) if group is None else group.buffer(ends[-1])
        # By bucket: its gradients, where they are. The `_version` of each grows with every change of one in place.
        self.flats = [
            self._allocate(bucket, devices[number], *ends[number : number + 2])
            for number, bucket in enumerate(buckets)
        ]
        self.views = cut_views(parameters, buckets, self.flats)
        # By bucket: the same memory as the engine takes it, made once; None: it lies on a GPU.
        self.arrays = [array_of(flat) if flat.device.type == "cpu" else None for flat in self.flats]

    def combine(self, flat: torch.Tensor) -> None:
        """Complete a bucket, on the host, once it is summed over all ranks. Called by the thread that summed it."""

    def _allocate(self, bucket: Bucket, device: torch.device, begin: int, end: int) -> torch.Tensor:
        dtype = getattr(torch, bucket.dtype)
        if device.type == "cpu":
            return torch.from_numpy(self._memory[begin:end]).view(dtype)
        warn_about_gpus()
        return torch.zeros(bucket.numel, dtype=dtype, device=device)
