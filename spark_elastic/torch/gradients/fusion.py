"""The memory of gradients: flat buckets in the group's shared memory, and in them a view for each gradient.

What lies there is reduced where it is, without a copy in or out. The memory belongs to one group: the next one's first
step makes another `Fusion`, and until then nobody but the gradients looks at it. Gradients of a GPU lie in buckets
there, which pass through pinned memory. Training thread only, except `ready`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.torch.gradients.buckets import Bucket
from spark_elastic.torch.tensors import warn_about_gpus


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
