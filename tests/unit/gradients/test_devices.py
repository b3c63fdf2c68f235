"""What torch and TensorFlow do and say where a worker has a GPU, as far as a machine without one can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients import devices
from spark_elastic.gradients.devices import select_device
from spark_elastic.gradients.generators import get_device_rng_state, seeded_rng
from spark_elastic.training.keras.devices import SlotGpuSelection
from spark_elastic.training.keras.trainer import prepare_gpus
from spark_elastic.worker.context import get_process_context


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_process_context(), "device", "cuda")


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
def test_a_local_rank_selects_the_gpu_of_a_worker_that_torch_sees(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, visible: str, asked: object, selected: object
) -> None:
    calls: list[object] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    devices.SlotGpuSelection()
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


@pytest.mark.parametrize(
    ("device", "visible", "selected"), [("cuda", "3", [0, 0, 0]), ("cuda", "3,4", [0, 1]), ("cpu", "3", [0])]
)
def test_a_local_rank_selects_the_gpu_of_a_worker_that_tensorflow_sees(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str, selected: list[int]
) -> None:
    gpus = [SimpleNamespace(device_type="GPU") for _ in visible.split(",")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for place in (tf.config, tf.config.experimental):
        monkeypatch.setattr(place, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(get_process_context(), "device", device)
    SlotGpuSelection()
    listed = tf.config.experimental.list_physical_devices("GPU")
    assert listed == tf.config.list_physical_devices("GPU") == gpus
    for local_rank, number in enumerate(selected):
        assert listed[local_rank] is gpus[number]
    if (device, visible) != ("cuda", "3"):
        with pytest.raises(IndexError):
            listed[2]


@pytest.mark.parametrize(
    ("device", "told"), [("cuda", [("grow", "GPU:0", True)]), ("cpu", [("show", [], "GPU")])]
)
def test_tensorflow_uses_the_device_of_the_worker_and_its_memory_as_it_needs_it(
    monkeypatch: pytest.MonkeyPatch, device: str, told: list[Any]
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *given: heard.append(("show", *given)))
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, grows: heard.append(("grow", gpu, grows))
    )
    prepare_gpus(device)
    assert heard == told


def test_a_gpu_that_tensorflow_does_not_find_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with pytest.raises(InvalidInput, match=r"and TensorFlow .* finds none: install tensorflow.and-cuda. on"):
        prepare_gpus("cuda")
