"""GPUs as TensorFlow uses them. Main thread, before TensorFlow first uses one. It was never run on one."""

from __future__ import annotations

import functools
import os
from typing import Any

import tensorflow as tf

from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.devices import list_visible_gpus


class _OneGpu(list[Any]):
    """The list of the one GPU that a worker sees: each number is that GPU."""

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(0 if isinstance(number, int) and number > 0 else number)


class SlotGpuSelection:
    """Wraps TensorFlow's list of GPUs: any number selects the GPU of a worker that sees one. Horovod's scripts begin
    with `tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")`. Created once in a process."""

    def __init__(self) -> None:
        list_devices = tf.config.list_physical_devices

        @functools.wraps(list_devices)
        def list_physical_devices(*given: Any, **named: Any) -> list[Any]:
            devices: list[Any] = list_devices(*given, **named)
            own = get_process_context().device == "cuda" and len(list_visible_gpus(os.environ)) == 1
            return _OneGpu(devices) if own and [d.device_type for d in devices] == ["GPU"] else devices

        for place in (tf.config, tf.config.experimental):
            place.list_physical_devices = list_physical_devices


def let_gpu_memory_grow() -> None:
    """By itself TensorFlow takes all memory of a GPU, which several processes share, such as a worker and its spare."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
