"""What the pretend accelerator catches: host code that touches its memory, and reads what has not arrived."""

from __future__ import annotations

import copy
import io
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial

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
    assert torch.equal(
        (there * torch.tensor(2.0)).cpu(), X * 2
    )  # as on a GPU, a single number may be the CPU's


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


def test_random_numbers_have_a_state_of_their_own() -> None:
    state = torch.pretend.get_rng_state()  # type: ignore[attr-defined]
    drawn = torch.randn(3, device="pretend")
    host = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(8, device="pretend"))
    assert torch.equal(torch.get_rng_state(), host)
    torch.pretend.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(torch.randn(3, device="pretend"), drawn)
    with pytest.raises(RuntimeError, match="Expected a 'pretend' device type for generator but found 'cpu'"):
        torch.randn(3, device="pretend", generator=torch.Generator())


def test_states_are_copied_and_pickled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to("pretend")
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for name, tensor in model.state_dict().items():
        assert torch.equal(copied.state_dict()[name], tensor)
        assert torch.equal(pickled.state_dict()[name], tensor)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, map_location="cpu")
    assert torch.equal(loaded["0.weight"], model[0].weight.cpu())


def train(kind: str, make: Callable[..., torch.optim.Optimizer], autocasts: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 6),
        torch.nn.Unflatten(1, (1, 5)),
        torch.nn.Conv2d(1, 4, 3, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LayerNorm(48),
        torch.nn.Linear(48, 3),
    ).to(kind)
    optimizer = make(model.parameters())
    rows = torch.arange(40).reshape(8, 5).remainder(10).to(kind)
    labels = torch.arange(8).remainder(3).to(kind)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=autocasts):
            loss = torch.nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [value.detach().cpu() for value in (loss, *model.state_dict().values())]


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        partial(torch.optim.Adam, lr=0.01, fused=True),
        partial(torch.optim.AdamW, lr=0.01, foreach=True),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_trained_weights_are_those_of_the_cpu(make: Callable[..., torch.optim.Optimizer]) -> None:
    for here, there in zip(train("cpu", make, False), train("pretend", make, False), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
    assert abs(train("cpu", make, False)[0] - train("pretend", make, True)[0]) < 0.05
