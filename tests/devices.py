"""The devices on which a test body runs: the CPU, the pretend accelerator, and a GPU where the machine has one."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.worker.context import get_process_context

DEVICES = ["cpu", "pretend", pytest.param("cuda", marks=pytest.mark.gpu)]


def use_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process train on a device, as a worker does whose slot was given it. Skips where there is none."""
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no accelerator")
    if kind == "pretend":
        pytest.importorskip("tests.pretend_device", reason="no pretend device")
    monkeypatch.setattr(get_process_context(), "device", kind)
