"""GPUs as TensorFlow uses them. Main thread, before TensorFlow first uses one. It was never run on one."""

from __future__ import annotations

import tensorflow as tf


def let_gpu_memory_grow() -> None:
    """Let TensorFlow take memory of GPUs as it needs it: by itself it takes all, and several processes share one, such
    as a worker and its spare, or tasks of `transform`."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
