"""Accelerate's `Accelerator` in each world. Training thread only."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import CPU
from spark_elastic.worker.context import get_context


def create_accelerator(**options: Any) -> Accelerator:
    """Create an `Accelerator` in the current world; call it at the beginning of an elastic loop.

    Args:
        options: those of `accelerate.Accelerator`.

    Raises:
        InvalidInput: Accelerate would train on each worker alone.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(**options)
    check_distributed(accelerator)
    return accelerator


def check_distributed(accelerator: Accelerator) -> None:
    """Prepare a new accelerator for its world.

    Raises:
        InvalidInput: it would train on each worker alone.
    """
    if accelerator.device.type == "cpu":
        accelerator.state.device = CPU  # moving a module to Accelerate's "cpu:1" copies all of it
    worker = get_context()
    world = None if worker is None else worker.world
    if world is not None and accelerator.num_processes != world.size:
        raise InvalidInput(
            f"Accelerate takes each of the {world.size} workers for a training of its own, on {accelerator.device}: "
            "set device='cpu' or device='cuda' of the job, or ACCELERATE_USE_CPU=true on its workers."
        )
