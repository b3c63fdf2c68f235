"""The devices on which a test body runs: the CPU, the pretend accelerator, and a GPU where the machine has one."""

from __future__ import annotations

import pytest

from spark_elastic.worker.context import get_process_context

DEVICES = ["cpu", "pretend", pytest.param("cuda", marks=pytest.mark.gpu)]


def initialize_cuda() -> None:
    """Load what CUDA loads once in a process, where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.nn.Linear(4, 4).cuda()(torch.ones(4, 4).pin_memory().cuda()).sum().backward()
        torch.cuda.synchronize()


def use_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process train on a device, as a worker does whose slot was given it. Skips where there is none."""
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no accelerator")
    if kind == "pretend":
        pytest.importorskip("tests.pretend_device", reason="no pretend device")
    monkeypatch.setattr(get_process_context(), "device", kind)
