"""Elastic training by Lightning's Trainer: `ElasticStrategy` and `ElasticModelParallelStrategy`, for the packages
`lightning` and `pytorch_lightning`.

A strategy says where this process is, and wraps and steps as DistributedDataParallel or FSDP2 do. In each world the
Trainer's own `fit` runs from the newest commit; see `lightning_loops`. Training thread only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import CPU
from spark_elastic.gradients.process_sets import local_rank, rank, size
from spark_elastic.handwritten.applied_gradients import mark_applied
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.integrations.lightning_loops import COMMIT, LightningFit, import_lightning
from spark_elastic.integrations.trainer_adapter import leave_frozen_out
from spark_elastic.worker.context import get_context

_ClusterEnvironment: Any = import_lightning("plugins.environments").ClusterEnvironment
_DDPStrategy: Any = import_lightning("strategies").DDPStrategy
_ParallelStrategy: Any = import_lightning("strategies").ParallelStrategy
_ModelParallelStrategy: Any = import_lightning("strategies").ModelParallelStrategy
_Launcher: Any = import_lightning("strategies.launchers.launcher")._Launcher

_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters.keys() - {"self", "module"}


class _Elastic(_ParallelStrategy):  # type: ignore[misc]
    """What a strategy of Lightning's needs to be elastic, however it divides the work."""

    strategy_name = "elastic"
    restore_checkpoint_after_setup = True  # model and optimizers have their final types and places by then

    def __init__(self, commit_every: int, timeout: timedelta | None, **options: Any) -> None:
        self._adapter = LightningFit(self, commit_every)
        waits = {} if timeout is None else {"timeout": timeout}
        super().__init__(**waits, **options)
        self.cluster_environment = _ElasticEnvironment()

    # ---- where this process is

    @property
    def root_device(self) -> Any:
        return (self.parallel_devices or [CPU])[0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": size(), "rank": rank()}

    def _configure_launcher(self) -> None:
        """Called by the Trainer's constructor, with all that it knows of devices."""
        devices = self.parallel_devices or []
        if any(device.type not in ("cpu", "cuda") for device in devices):
            raise InvalidInput(
                "ElasticStrategy trains on CPUs and on GPUs of CUDA: pass Trainer(accelerator='cpu') or "
                "Trainer(accelerator='gpu')."
            )
        if len(devices) > 1 or self.num_nodes > 1:
            raise InvalidInput(
                "with ElasticStrategy each worker is one process, and the job says how many there are: leave devices "
                "and num_nodes out of the Trainer, and give num_workers to spark_elastic.run, and device='cuda' where "
                "a worker is to see its own GPU alone."
            )
        self._launcher = _ElasticLauncher(self._adapter)

    # ---- training

    def setup(self, trainer: Any) -> None:
        if self._adapter.state is not None:
            self._adapter.fill_model(self.root_device)
        super().setup(trainer)
        if self._adapter.state is not None:
            self._adapter.handle_values()

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._adapter.state is not None and self._adapter.trainer.training:
            if not isinstance(dataloader, ElasticDataLoader):
                raise InvalidInput(
                    f"ElasticStrategy trains on an ElasticDataLoader, and got a {type(dataloader).__name__}: make it "
                    "by ElasticDataLoader(dataset, global_batch_size)."
                )
            self._adapter.loader = dataloader
        return dataloader

    def backward(self, closure_loss: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Weighted by this rank's part of the step's rows: the ranks' average is then that of all rows."""
        return super().backward(closure_loss * self._adapter.loss_weight, *args, **options)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **options)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            mark_applied(optimizer)  # also where the scaler of fp16 has skipped the step: it is over
        return result

    # ---- commits, which hold model and optimizers in a way of their own

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._adapter.is_capturing else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {} if self._adapter.is_capturing else super().optimizer_state(optimizer)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        if checkpoint_path == COMMIT:
            return self._adapter.load_checkpoint()
        return super().load_checkpoint(checkpoint_path, weights_only)


class ElasticStrategy(_Elastic, _DDPStrategy):  # type: ignore[misc]
    """`Trainer(strategy=ElasticStrategy())`: a `fit` that survives the loss of workers, on CPUs or on GPUs.

    The rows come from one `ElasticDataLoader`, so that each comes once per epoch and weights do not depend on the
    world. `training_step` returns the mean loss of its rows; the gradients are then those of the mean over the rows of
    all ranks. Outside of a job, the Trainer trains in this process alone.
    """

    def __init__(self, commit_every: int = 1, timeout: timedelta | None = None, **options: Any) -> None:
        """
        Args:
            commit_every: optimizer steps from commit to commit. A loss repeats the steps since the newest one.
            timeout: how long a collective waits for a rank that is alive; None takes torch's default.
            options: those of DistributedDataParallel.

        Raises:
            InvalidInput: an argument is wrong.
        """
        for name in options.keys() - _DDP_OPTIONS:
            raise InvalidInput(
                f"ElasticStrategy has no option {name!r}: it takes those of DistributedDataParallel, as in "
                "ElasticStrategy(find_unused_parameters=True)."
            )
        super().__init__(commit_every, timeout, **options)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        if get_context() is not None and not dist.is_initialized():
            dist.init_process_group(timeout=self._timeout)

    def configure_ddp(self) -> None:
        if dist.is_initialized():
            self._wrapped_for = self._list_trained()
            with leave_frozen_out(self.lightning_module) if self._adapter.resumes else nullcontext():
                super().configure_ddp()

    def _list_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.lightning_module.parameters()]

    def training_step(self, *args: Any, **options: Any) -> Any:
        """DistributedDataParallel exchanges what was trained when it was made: a callback or a commit has frozen or
        unfrozen layers since."""
        if isinstance(self.model, DistributedDataParallel) and self._wrapped_for != self._list_trained():
            self.model: torch.nn.Module = self.lightning_module
            self.configure_ddp()
        return super().training_step(*args, **options)


class ElasticModelParallelStrategy(_Elastic, _ModelParallelStrategy):  # type: ignore[misc]
    """As `ElasticStrategy`, for a model of which no worker has the whole: `configure_model` of the LightningModule
    divides it by `fully_shard(part, mesh=self.device_mesh["data_parallel"])`, in each world anew."""

    def __init__(
        self,
        commit_every: int = 1,
        timeout: timedelta | None = None,
        save_distributed_checkpoint: bool = True,
    ) -> None:
        """
        Args:
            commit_every: as for `ElasticStrategy`.
            timeout: likewise.
            save_distributed_checkpoint: as for Lightning's ModelParallelStrategy.

        Raises:
            InvalidInput: an argument is wrong, or torch is too old.
        """
        importlib.import_module("spark_elastic.handwritten.fsdp")  # needs torch 2.7
        super().__init__(commit_every, timeout, save_distributed_checkpoint=save_distributed_checkpoint)
        self._adapter.divides = True

    def setup_environment(self) -> None:
        if get_context() is None:
            raise InvalidInput(
                "ElasticModelParallelStrategy divides a model over the workers of a job: call fit in a function of "
                "spark_elastic.run, or leave the strategy out of the Trainer."
            )
        self._data_parallel_size, self._tensor_parallel_size = size(), 1
        super().setup_environment()

    def _setup_distributed(self) -> None:
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        if not dist.is_initialized():
            dist.init_process_group(timeout=self._timeout)


class _ElasticLauncher(_Launcher):  # type: ignore[misc]
    """Through it the Trainer calls what `fit`, `validate`, `test` and `predict` do."""

    is_interactive_compatible = True

    def __init__(self, adapter: LightningFit) -> None:
        self._adapter = adapter

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **options: Any) -> Any:
        if trainer is not None and function == trainer._fit_impl:
            return self._adapter.fit(trainer, function, list(args))
        return function(*args, **options)

    def kill(self, signum: Any) -> None:
        """Nothing: the job owns the processes."""


class _ElasticEnvironment(_ClusterEnvironment):  # type: ignore[misc]
    """The world of this worker, as it is now."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # there is no such port: torch's store is the driver's
    world_size, global_rank, local_rank = staticmethod(size), staticmethod(rank), staticmethod(local_rank)

    @staticmethod
    def detect() -> bool:
        return False

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        """Nothing: the job decides."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the job decides."""
