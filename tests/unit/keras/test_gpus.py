"""What TensorFlow is told about a worker's GPU. It was never run on one."""

from __future__ import annotations

import pytest
import tensorflow as tf

from spark_elastic.keras.train.trainer import let_gpu_memory_grow


def test_memory_of_the_gpu_grows_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    growing: list[tuple[str, bool]] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0"])
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, grows: growing.append((gpu, grows))
    )
    let_gpu_memory_grow()
    assert growing == [("GPU:0", True)]
