"""The device that a worker trains on. Training thread only."""

from __future__ import annotations

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import get_process_context


def select_device() -> torch.device:
    """Return the device of this process.

    Raises:
        InvalidInput: torch finds no GPU, and the slot was given one.
    """
    kind = get_process_context().device
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(_explain_missing_gpu())
    return torch.device(kind, 0)  # the process sees no other GPUs


def _explain_missing_gpu() -> str:
    if torch.version.cuda is None:
        return (
            f"this worker is to train on a GPU, and its torch {torch.__version__} is built without CUDA: install "
            "torch for CUDA on the executors, or set device='cpu'."
        )
    return (
        f"this worker is to train on a GPU, and torch {torch.__version__} (CUDA {torch.version.cuda}) finds none: "
        "look at nvidia-smi on its host for the driver, or set device='cpu'."
    )
