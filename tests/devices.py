"""The devices on which a test body runs: the CPU, and a GPU where the machine has one.

A process whose environment has ONLY=pretend runs them on the pretend accelerator alone: once torch knows that, some
libraries would choose it for everything.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

ONLY = "SPARK_ELASTIC_TESTS_DEVICE"
DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Where workers are processes, which other tests of the CPU cover.
ACCELERATORS: list[Any] = DEVICES[1:]
if os.environ.get(ONLY) == "pretend":
    DEVICES = ACCELERATORS = ["pretend"]


def initialize_cuda() -> None:
    """Load what CUDA loads once in a process, where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.nn.Linear(4, 4).cuda()(torch.ones(4, 4).pin_memory().cuda()).sum().backward()
        if torch.distributed.is_nccl_available():
            nccl: Any = torch.distributed.ProcessGroupNCCL
            nccl(torch.distributed.HashStore(), 0, 1).allreduce([torch.ones(1, device="cuda")]).wait()
        torch.cuda.synchronize()


def use_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process train on a device, as a worker does whose slot was given it. Skips where there is none."""
    import torch

    from spark_elastic.worker.context import get_process_context

    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no accelerator")
    monkeypatch.setattr(get_process_context(), "device", kind)
