"""What the pretend accelerator catches: host code that touches its memory, and reads what has not arrived."""

from __future__ import annotations

import pytest
import torch

from tests import pretend_device

X = torch.arange(6.0).reshape(2, 3)


def test_operands_of_two_devices_are_refused() -> None:
    there = X.to("pretend")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        there + X
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._foreach_add_([there], [X])
    assert torch.equal((there + 1).cpu(), X + 1)
    assert torch.equal((there * torch.tensor(2.0)).cpu(), X * 2), (
        "as on a GPU, a single number may be the CPU's"
    )


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
    assert pretend_device.count_waits() == before + 2


def test_views_share_memory_and_modules_keep_their_parameters() -> None:
    flat = torch.zeros(6, device="pretend")
    flat[2:5].view(3, 1).fill_(1.0)
    assert flat.tolist() == [0, 0, 1, 1, 1, 0]
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    assert all(a is b for a, b in zip(model.to("pretend").parameters(), parameters, strict=True))
    before = parameters[0].detach().cpu().clone()
    model(X.to("pretend")).pow(3).sum().backward()
    optimizer.step()
    assert not torch.equal(parameters[0].detach().cpu(), before)
