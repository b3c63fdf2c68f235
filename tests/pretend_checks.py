"""What the pretend accelerator catches: host code that touches its memory, and reads what has not arrived."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from tests import pretend_device

X = torch.arange(6.0).reshape(2, 3)


def test_operands_of_two_devices_are_refused() -> None:
    there = X.to("pretend")
    for mix in (
        lambda: there + X,
        lambda: torch._foreach_add_([there], [X]),
        lambda: torch.nn.Conv1d(2, 1, 1)(there),
        lambda: torch.tensor(0.0).add_(there.sum()),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()
    assert torch.equal((there + 1).cpu(), X + 1)
    # As on a GPU, a single number may be the CPU's.
    assert torch.equal((there * torch.tensor(2.0)).cpu(), X * 2)


def test_the_host_gets_at_no_memory() -> None:
    with pytest.raises(TypeError, match="can't convert pretend:0 device type tensor to numpy"):
        X.to("pretend").numpy()


def test_what_has_not_arrived_is_garbage() -> None:
    here = torch.empty(2, 3).copy_(X.to("pretend"), non_blocking=True)
    assert not torch.equal(here, X)
    torch.pretend.synchronize()  # type: ignore[attr-defined]
    assert torch.equal(here, X)


def test_waits_are_counted() -> None:
    there, before = X.to("pretend"), pretend_device.count_waits()
    there.add_(1).mul_(2)
    assert pretend_device.count_waits() == before
    there.sum().item()
    there.cpu()
    there.nonzero()
    X.to("pretend")
    assert pretend_device.count_waits() == before + 4


def test_an_address_cannot_be_read() -> None:
    code = "import ctypes, torch, tests.pretend_device; there = torch.ones(4, device='pretend')"
    command = [sys.executable, "-c", f"{code}; print(ctypes.c_float.from_address(there.data_ptr()).value)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout == ""


def test_an_event_covers_what_came_before_it() -> None:
    early, late = torch.pretend.Event(), torch.pretend.Event()  # type: ignore[attr-defined]
    early.record()
    here = torch.empty(2, 3).copy_(X.to("pretend"), non_blocking=True)
    late.record()
    early.synchronize()
    assert not torch.equal(here, X)
    late.synchronize()
    assert torch.equal(here, X)


def test_a_stream_waits_for_what_it_uses_of_another() -> None:
    side, main = torch.pretend.Stream(), torch.pretend.current_stream()  # type: ignore[attr-defined]
    with torch.pretend.stream(side):  # type: ignore[attr-defined]
        there = X.pin_memory().to("pretend", non_blocking=True).double()
    with pytest.raises(RuntimeError, match="is used on stream 0, which does not wait for it"):
        there + 1
    main.wait_stream(side)
    assert torch.equal((there + 1).cpu(), X.double() + 1)


def test_pinned_memory_is_left_alone_until_its_copy_has_completed() -> None:
    pinned = X.pin_memory()
    there = pinned.to("pretend", non_blocking=True)
    pinned.zero_()
    with pytest.raises(RuntimeError, match="pinned memory was changed"):
        torch.pretend.synchronize()  # type: ignore[attr-defined]
    pinned.to("pretend", non_blocking=True)
    torch.pretend.synchronize()  # type: ignore[attr-defined]
    pinned.zero_()
    assert torch.equal(there.cpu(), X)
    copied = pinned.to("pretend", non_blocking=True)
    pinned.copy_(there, non_blocking=True)  # after the copy before, in the order of the stream
    assert copied.sum().item() == 0
    assert torch.equal(pinned, X)
