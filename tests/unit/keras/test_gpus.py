"""What TensorFlow is told about a worker's GPU. It was never run on one."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from spark_elastic.errors import InvalidInput
from spark_elastic.training.keras.trainer import prepare_gpus


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
    with pytest.raises(
        InvalidInput, match=r"and TensorFlow .* finds none: install tensorflow.and-cuda. on the exec"
    ):
        prepare_gpus("cuda")
