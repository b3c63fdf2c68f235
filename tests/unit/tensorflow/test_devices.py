"""What TensorFlow is told about the GPU of a worker, as far as a machine without one can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from spark_elastic.errors import InvalidInput
from spark_elastic.training.keras.devices import SlotGpuSelection
from spark_elastic.training.keras.trainer import prepare_gpus
from spark_elastic.worker.context import get_process_context


@pytest.mark.parametrize(
    ("device", "visible", "selected"), [("cuda", "3", [0, 0, 0]), ("cuda", "3,4", [0, 1]), ("cpu", "3", [0])]
)
def test_a_local_rank_selects_the_gpu_of_a_worker_that_sees_one(
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
