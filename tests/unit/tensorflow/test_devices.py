"""Which GPU a worker of TensorFlow selects, as far as a machine without one can tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from spark_elastic.training.keras.devices import SlotGpuSelection
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
