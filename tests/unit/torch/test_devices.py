"""What torch says where a worker has a GPU that it cannot use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import SlotGpuSelection, select_device
from spark_elastic.gradients.generators import get_device_rng_state, seeded_rng
from spark_elastic.worker.context import get_process_context


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    get_process_context().device = "cuda"
    yield
    get_process_context().device = "cpu"


def test_a_worker_trains_on_the_cpu_unless_it_has_a_gpu() -> None:
    assert select_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("cuda", "sentence"),
    [
        (None, "its torch 2.99 is built without CUDA: install torch for CUDA on the executors, or set"),
        ("13.0", r"torch 2.99 \(CUDA 13.0\) finds none: look at nvidia-smi on its host for the driver"),
    ],
)
def test_a_gpu_that_torch_does_not_find_is_an_error(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, cuda: str | None, sentence: str
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInput, match=sentence):
        select_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select_device() == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("visible", "asked", "selected"), [("3", 2, 0), ("3", "cuda:0", "cuda:0"), ("3,4", 1, 1)]
)
def test_a_local_rank_selects_the_gpu_of_a_worker_that_sees_one(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, visible: str, asked: object, selected: object
) -> None:
    calls: list[object] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    SlotGpuSelection()
    torch.cuda.set_device(asked)
    assert calls == [selected]


def test_a_process_that_a_data_loader_forked_leaves_the_gpu_s_generator_alone(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA cannot be used in a fork."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", object)
    assert get_device_rng_state() is None
    with seeded_rng(7):
        drawn = torch.rand(1)
    with seeded_rng(7):
        assert torch.rand(1) == drawn
