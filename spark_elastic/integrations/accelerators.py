"""Accelerate's `Accelerator` in each world. Training thread only."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather, recursively_apply

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
    if (
        accelerator.num_processes > 1
    ):  # not bound: only a collection would free it, with the models of its world
        accelerator.gather = partial(recursively_apply, _gather_rows, error_on_other_type=True)


def _gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Accelerate's `gather`, of ranks whose parts of a step differ by a row: TRL's trainers gather metrics by it."""
    counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist() if tensor.ndim else [0]
    if len(set(counts)) == 1:
        gathered: torch.Tensor = gather(tensor)
        return gathered
    padding = tensor.new_zeros(max(counts) - len(tensor), *tensor.shape[1:])
    parts = gather(torch.cat([tensor, padding])).split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def check_fsdp(args: Any) -> None:
    """
    Args:
        args: `TrainingArguments` with fsdp.

    Raises:
        InvalidInput: torch is too old, or another world could not divide the model again in this way.
    """
    importlib.import_module("spark_elastic.handwritten.fsdp")  # needs torch 2.7
    config, parallel = args.fsdp_config, getattr(args, "parallelism_config", None)
    refused = {
        "FSDP1 (version=1)": int(config.get("version", 2)) != 2,
        "cpu_offload": bool(config.get("cpu_offload")),
        "xla": bool(config.get("xla")),
        "parallelism_config": parallel is not None and parallel.total_size > 1,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise InvalidInput(
            f"ElasticTrainer divides a model by rows over all workers, as FSDP2 does, and not with {name}: leave it "
            "out of the TrainingArguments."
        )
    if get_context() is None:
        raise InvalidInput(
            "ElasticTrainer with fsdp divides a model over the workers of a job: call it in a function of "
            "spark_elastic.run, or leave fsdp out of the TrainingArguments."
        )


def divide_models(accelerator: Accelerator, options: dict[str, Any]) -> None:
    """Have a new accelerator divide models by FSDP2: by itself it divides none on CPUs, and says nothing.

    Args:
        options: those of `FullyShardedDataParallelPlugin`.
    """
    state = accelerator.state
    if accelerator.device.type == "cpu":
        if not dist.is_initialized():
            dist.init_process_group()  # Accelerate takes one worker for none
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    # All ranks have the model by then, or one of no values that is divided.
    state.fsdp_plugin.cpu_ram_efficient_loading = False
