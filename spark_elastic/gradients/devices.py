"""The device that a worker trains on, and copies between it and the memory of the host. Training thread only.

On a GPU the training thread runs ahead of the device. It waits for the device where the ranks exchange, and nowhere
else: what it needs on the host is copied in the order of the stream, and read after the backward pass was launched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.devices import list_visible_gpus

CPU = torch.device("cpu")


def select_device() -> torch.device:
    """Return the device of this process. Raises InvalidInput if torch finds no GPU, and the slot was given one."""
    kind = get_process_context().device
    if kind == "cpu":
        return CPU
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(_explain_missing_gpu())
    return torch.device(kind, 0)  # the process sees no other GPUs


def _explain_missing_gpu() -> str:
    if torch.version.cuda is None:
        return (
            f"this worker is to train on a GPU, and its torch {torch.__version__} is built without CUDA: install "
            "torch for CUDA on the executors, or set device='cpu'."
        )
    return (
        f"this worker is to train on a GPU, and torch {torch.__version__} (CUDA {torch.version.cuda}) finds none: "
        "look at nvidia-smi on its host for the driver, or set device='cpu'."
    )


class SlotGpuSelection:
    """Wraps `torch.cuda.set_device`: any number selects the GPU of a worker that sees one. Horovod's scripts begin with
    `torch.cuda.set_device(hvd.local_rank())`. Created once in a process."""

    def __init__(self) -> None:
        select = torch.cuda.set_device

        @functools.wraps(select)
        def set_device(device: Any) -> None:
            own = get_process_context().device == "cuda" and len(list_visible_gpus(os.environ)) == 1
            select(0 if own and isinstance(device, int) and device > 0 else device)

        torch.cuda.set_device = set_device


def get_device_module(device: torch.device) -> Any:
    """torch's module for a device that is not the CPU, such as `torch.cuda`."""
    return getattr(torch, device.type)


def initialize_device(device: torch.device) -> None:
    """Create this process's context on the device, which takes seconds; a spare does so in advance."""
    if device != CPU:
        warm = torch.ones((8, 8), device=device)
        torch.mm(warm, warm)  # loads the libraries of matrix products


class ExhaustedMemoryAdvice:
    """A context that says what to change where the memory of the GPU does not suffice; each step enters it."""

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            reason = str(error).partition(". ")[0]
            raise InvalidInput(f"the memory of the GPU is exhausted ({reason}): {self._advice}.") from error


class HostCopy:
    """Tensors on their way to the host, copied once the device has computed them. Tensors of the CPU are there."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor if tensor.device == CPU else self._start_copy(tensor) for tensor in tensors]
        self._copied: Any = None
        device = next((tensor.device for tensor in tensors if tensor.device != CPU), CPU)
        if device != CPU:
            self._copied = get_device_module(device).Event()
            self._copied.record()

    def wait(self) -> list[torch.Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._tensors

    @staticmethod
    def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


class SnapshotCopy:
    """Copies tensors of a device to the memory of a snapshot, for `SnapshotBuilder.add_remote`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned memory, to which a GPU copies without a pass over pages of the host."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def begin(self, tensor: torch.Tensor, memory: npt.NDArray[np.uint8]) -> None:
        if tensor.numel():
            target = torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        get_device_module(self._device).current_stream().synchronize()


def read_later(number: torch.Tensor) -> float | torch.Tensor:
    """A tensor of one number as a float; where a device has yet to compute it, as a tensor ()."""
    return float(number) if number.device == CPU else number.detach().reshape(())


class HostSum:
    """The sum of numbers that a device computes, added on the host in the order of `add`."""

    def __init__(self) -> None:
        self._numbers: list[float | HostCopy] = []

    def add(self, number: torch.Tensor) -> None:
        """Add a tensor (). Returns at once, also if the device has not computed it yet."""
        detached = number.detach()
        self._numbers.append(float(detached) if detached.device == CPU else HostCopy([detached]))

    def compute(self) -> float:
        total = 0.0
        for number in self._numbers:
            total += number if isinstance(number, float) else float(number.wait()[0])
        return total


class DeviceCopier:
    """Copies arrays of the host to a device through pinned memory, on a stream beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = get_device_module(device)
        self._stream = self._module.Stream()

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Start to copy a tensor of the CPU to the device, as `dtype`; what is narrower travels. Another stream must
        not use the result before `Arrival.wait`."""
        narrow = dtype if dtype.itemsize <= tensor.dtype.itemsize else tensor.dtype
        pinned = torch.empty(tensor.shape, dtype=narrow, pin_memory=True).copy_(tensor)
        with self._module.stream(self._stream):
            return pinned.to(self._device, non_blocking=True).to(dtype)

    def record(self) -> Arrival:
        arrived = self._module.Event()
        arrived.record(self._stream)
        return Arrival(self._module, arrived)


class Arrival:
    def __init__(self, module: Any, arrived: Any) -> None:
        self._module, self._arrived = module, arrived

    def wait(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have what is computed from now on wait for the copies of these tensors; this thread does not."""
        stream = self._module.current_stream()
        stream.wait_event(self._arrived)
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)
