"""Which parameters take part in an exchange of gradients, in which buckets their gradients lie, and where (R7, layout).

All ranks must find the same: from the state of the model, the options, and what they agreed on in this world. Buckets
on the CPU lie in the group's shared memory: the engine sums them where they are, without a copy in or out. Those on a
GPU lie there. Training thread only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.buckets import Bucket, ParameterSpec, build_buckets, hash_layout
from spark_elastic.gradients.flat_allreduce import allocate_aligned
from spark_elastic.gradients.host_memory import array_of, get_dtype_name, warn_about_gpus
from spark_elastic.gradients.reduction import ExchangeOptions

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def find_trainable(named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.nn.Parameter]:
    """The parameters that require a gradient now, by name. Raises InvalidInput if one of them cannot be exchanged."""
    trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
    for name, parameter in trainable.items():
        if parameter.device.type == "meta":
            raise InvalidInput(
                f"parameter {name!r} is on {parameter.device}, and has no values: give the model some first."
            )
        if parameter.dtype not in DTYPES:
            raise InvalidInput(
                f"parameter {name!r} is {parameter.dtype}: only float16, bfloat16, float32 and float64 can be trained."
            )
    if not trainable:
        raise InvalidInput("the model has no parameter that requires a gradient: there is nothing to train.")
    return trainable


def build_specs(names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> list[ParameterSpec]:
    return [
        ParameterSpec(name, tuple(p.shape), get_dtype_name(p.dtype), p.element_size(), str(p.device))
        for name, p in zip(names, parameters, strict=True)
    ]


@dataclass(frozen=True)
class GradientLayout:
    """Which gradients are exchanged, how, and in which buckets; parameters have the same numbers on all ranks."""

    names: Sequence[str]  # of the parameters
    parameters: Sequence[torch.nn.Parameter]  # those whose gradients are exchanged
    specs: Sequence[ParameterSpec]  # what all ranks must have in common of them
    options: ExchangeOptions  # how they are exchanged
    sparse: frozenset[int]  # numbers of the parameters whose gradients lie in no bucket
    buckets: Sequence[Bucket]  # in the order in which they are summed
    hash: int  # differs if two ranks have another layout or other options


class ExchangedParameters:
    """The parameters that an exchange takes in: those that were trained when it was made or are trained now, and within
    one world those that were in between. A newcomer knows that much from the state, so that all ranks have the same."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._named = list(named)
        # Parameters that were trained when the exchange was made, by name: the first in each layout.
        self._first = find_trainable(self._named)
        self._select(self._first)

    def replace(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._named = list(named)
        own = {id(parameter) for _, parameter in self._named}
        self._first = {name: parameter for name, parameter in self._first.items() if id(parameter) in own}
        self._select(self._first)

    def follow_flags(self, begins_world: bool) -> bool:
        """Take in what is trained now. Returns whether the parameters have changed."""
        if not begins_world and not any(parameter.requires_grad for parameter in self._frozen):
            return False
        former = {} if begins_world else dict(zip(self.names, self.parameters, strict=True))
        wanted = {**self._first, **former, **find_trainable(self._named)}
        if wanted.keys() == set(self.names):
            return False
        self._select(wanted)
        return True

    def lay_out(self, options: ExchangeOptions, sparse: frozenset[int]) -> GradientLayout:
        specs = build_specs(self.names, self.parameters)
        buckets = build_buckets(specs, options.bucket_bytes, options.groups, sparse)
        layout_hash = hash_layout(specs, buckets, options.description)
        return GradientLayout(self.names, self.parameters, specs, options, sparse, buckets, layout_hash)

    def find_device(self) -> torch.device:
        """The first device that is not the CPU, whose gradients the bulk plane can sum; the CPU if there is none."""
        devices = [parameter.device for parameter in self.parameters]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def _select(self, wanted: Mapping[str, torch.nn.Parameter]) -> None:
        later = {name: p for name, p in self._named if name in wanted and name not in self._first}
        exchanged = {**self._first, **later}
        self.names, self.parameters = list(exchanged), list(exchanged.values())
        self._frozen = [parameter for name, parameter in self._named if name not in exchanged]


Views = list[torch.Tensor | None]  # by parameter; None: it lies in no bucket


def cut_views(
    parameters: Sequence[torch.nn.Parameter], buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]
) -> Views:
    """The place of each parameter's gradient in the memory of the buckets."""
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
        """All ranks of `group` call it at the same place among their collectives. group: None: this process alone."""
        self.buckets = buckets
        # By number of the parameter: that of its bucket.
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
        spans = zip(buckets, devices, ends, ends[1:], strict=False)
        self.flats = [self._allocate(bucket, device, begin, end) for bucket, device, begin, end in spans]
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
