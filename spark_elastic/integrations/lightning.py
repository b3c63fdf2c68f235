"""Elastic training by Lightning's Trainer: `ElasticStrategy` and `ElasticModelParallelStrategy`, for the packages
`lightning` and `pytorch_lightning`.

A strategy says where this process is, and wraps and steps as DistributedDataParallel or FSDP2 do. In each world the
Trainer's own `fit` runs from the newest commit. A commit is a checkpoint of Lightning's kept in memory: the Trainer
restores callbacks, loops, schedulers and the position of the data as from a file, `LightningFit` model and optimizers.
Training thread only.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import CPU
from spark_elastic.gradients.generators import get_generators, set_generators
from spark_elastic.gradients.module_state import FrozenCopies, ModelStateHandler, OptimizerStateHandler
from spark_elastic.gradients.process_sets import local_rank, rank, size
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.handwritten.torch_state import forget_gradients, mark_applied
from spark_elastic.integrations.trainer_adapter import TrainerAdapter, leave_frozen_out
from spark_elastic.runs.snapshot import Kept, SnapshotBuilder, pickle_value
from spark_elastic.worker.context import get_context

_Methods: Any = object  # for mypy: those of a class of Lightning's
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters.keys() - {"self", "module"}
COMMIT = "the newest commit, in memory"  # in place of a checkpoint's path


class _Joined(_Methods):  # type: ignore[misc]
    """Its objects are also those of Lightning's class `base`, from the package that the program uses: it has imported
    that when it makes the object, but not yet when a fork server imports this module."""

    base = ""  # module:class

    def __new__(cls, *_: Any, **__: Any) -> Any:
        kind: Any = cls
        return super().__new__(_join(kind))


@cache
def _join(kind: Any) -> Any:
    base = import_lightning(kind.base)
    if issubclass(kind, base):
        return kind
    return type(base)(kind.__name__, (kind, base), {"__module__": kind.__module__})


def import_lightning(text: str) -> Any:
    """Import a class of the package that the program uses. text: module:class."""
    return pkgutil.resolve_name(f"{_choose_package()}.{text}")


@cache
def _choose_package() -> str:
    names = "lightning.pytorch", "pytorch_lightning"
    installed = names[0] if find_spec("lightning") else names[1]
    return next((name for name in names if name in sys.modules), installed)


class LightningFit(TrainerAdapter):
    """The `fit` of a Trainer. Lightning makes optimizers, loaders and what wraps the model again in each world."""

    @property
    def has_memory(self) -> bool:  # type: ignore[override]
        return self.divided is None

    def __init__(self, strategy: Any, commit_every: int) -> None:
        super().__init__(commit_every)
        self._strategy = strategy
        self.trainer: Any = None  # that of the `fit` under way
        self.divides = False  # whether `configure_model` divides the model by FSDP2
        # Of this world's model and optimizers, unless the model is divided; None before Lightning has made them.
        self._handlers: list[Any] | None = None
        self.is_capturing = False
        self.frozen = FrozenCopies()  # of the model of the `fit` under way
        self.generators: Any = None  # to be set when training begins with a commit
        self.resumes = False  # in this world the Trainer has begun with a commit, and trained no batch yet

    @property
    def step(self) -> int:
        return int(self.trainer.global_step)

    def forget(self) -> None:
        self._handlers = None

    def list_optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self._handlers is None else list(self._strategy.optimizers)

    def list_kept(self) -> Mapping[Any, Kept]:
        return self.frozen.list_copies()

    def fit(self, trainer: Any, fit: Callable[..., Any], arguments: list[Any]) -> Any:
        """Run a Trainer's `fit` in world after world, until the last step. The path of a checkpoint among its arguments
        counts until the first commit."""
        self.trainer, self.frozen = trainer, FrozenCopies()
        model = self._strategy.lightning_module
        if self.divides:
            self.divide(model, lambda: self._strategy.optimizers)
        else:
            self.frozen.take({name: p for name, p in model.named_parameters() if not p.requires_grad})
        _replace_loops(trainer, self)
        place = list(inspect.signature(fit).parameters).index("ckpt_path")

        def fit_in_world() -> Any:
            if self.has_begun:
                trainer.training = True  # the world may have ended in a validation
                trainer._teardown()  # Lightning's own end of what the former world had
            given, self.resumes = list(arguments), self.restore()
            if self.resumes:
                given[place] = COMMIT
            return fit(*given)

        return self.train_in_worlds(fit_in_world)

    def handle_values(self) -> None:
        """Take the model and the optimizers that Lightning has made for this world."""
        assert self.state is not None
        scaler = getattr(self._strategy.precision_plugin, "scaler", None)
        if scaler is not None:
            forget_gradients(scaler)
        if self.divided is not None:
            if self.pending is None:  # else callbacks come first, as before a checkpoint is loaded
                self.finish_world()
            self._handlers = []
            return
        model, optimizers = self._strategy.lightning_module, self._strategy.optimizers
        whole = ModelStateHandler(model)
        whole.frozen = self.frozen
        whole.trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        self._handlers = [whole, *map(OptimizerStateHandler, optimizers)]
        for handler in self._handlers[1:]:
            handler.list_parameters = model.named_parameters
        self.state._hooked.clear()

    # ---- commits

    def capture(self, builder: SnapshotBuilder) -> dict[str, Any] | None:
        """Everything that a checkpoint of Lightning holds; None before the model is set up."""
        if self._handlers is None:
            return None
        trainer, self.is_capturing = self.trainer, True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.is_capturing = False
        del checkpoint["state_dict"], checkpoint["optimizer_states"]
        connector = trainer._logger_connector
        rest = {
            "checkpoint": checkpoint,
            "generators": get_generators(),
            "should stop": trainer.should_stop,
            "position": self.loader.state_dict(),
            "metrics": (dict(connector._callback_metrics), dict(connector._logged_metrics)),
        }
        parts = [handler.capture(builder) for handler in self._handlers]
        return {"parts": parts, "rest": pickle_value(rest)}

    def load_checkpoint(self) -> dict[str, Any]:
        """Restore model and optimizers; returns what the Trainer restores."""
        assert self._handlers is not None
        self.finish_world()
        values, memory = self.pending
        for handler, saved in zip(self._handlers, values["parts"], strict=True):
            handler.load(saved, memory)
        checkpoint: dict[str, Any] = pickle.loads(values["rest"])["checkpoint"]
        weights = self._strategy.lightning_module.state_dict()
        return {**checkpoint, "state_dict": weights, "optimizer_states": []}

    def finish_restoring(self) -> None:
        """The Trainer has restored what a checkpoint of Lightning holds; here is the rest."""
        if self.divided is not None:
            self.divided.reshard()
        if self.pending is None:
            return
        rest = pickle.loads(self.pending[0]["rest"])
        super().finish_restoring()
        self.trainer.should_stop = rest["should stop"]
        connector = self.trainer._logger_connector
        connector._callback_metrics, connector._logged_metrics = rest["metrics"]
        self.loader.load_state_dict(rest["position"])
        iter(self.trainer.fit_loop._data_fetcher)  # from that position on
        self.generators = rest["generators"]

    def enter_epoch(self, epoch: int) -> bool:
        """Whether the loader was in an earlier one: Lightning stops at the last batch, and may make new loaders."""
        if self.loader.epoch >= epoch:
            return False
        self.loader.set_epoch(epoch)
        return True


class _ElasticFitLoop(_Joined):
    """Lightning's loop over epochs; commits at the start of training and at the end of each epoch."""

    base = "loops.fit_loop:_FitLoop"
    adapter: LightningFit

    def run(self) -> None:
        self.setup_data()
        self.adapter.finish_restoring()
        super().run()

    def on_run_start(self) -> None:
        super().on_run_start()
        if self.adapter.resumes:
            set_generators(self.adapter.generators)
        elif not self.restarting:  # a checkpoint's file has counters that fit no commit before the first step
            self.adapter.commit()

    def on_advance_start(self) -> None:
        super().on_advance_start()
        if self.adapter.enter_epoch(self.epoch_progress.current.processed):
            iter(self._data_fetcher)

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.adapter.enter_epoch(self.epoch_progress.current.processed)
        self.adapter.commit()


class _ElasticEpochLoop(_Joined):
    """Lightning's loop over batches; commits between two of them, after all that Lightning does for the first."""

    base = "loops.training_epoch_loop:_TrainingEpochLoop"
    adapter: LightningFit

    def reset(self) -> None:
        if self.adapter.resumes and self._num_ready_batches_reached():
            self.restarting = False  # the commit followed an epoch's end, and this is the next epoch
        super().reset()

    def advance(self, data_fetcher: Any) -> None:
        if self.adapter.resumes:
            # Nothing of the batch before is left to be done, such as its validation.
            self.adapter.resumes = self.trainer.fit_loop.restarting = False
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        super().on_advance_end(data_fetcher)
        if self.adapter.is_due() and not self.done:
            self.adapter.commit()


def _replace_loops(trainer: Any, adapter: LightningFit) -> None:
    loops = {trainer.fit_loop: _ElasticFitLoop, trainer.fit_loop.epoch_loop: _ElasticEpochLoop}
    for loop, kind in loops.items():
        if not isinstance(loop, kind):
            if type(loop) is not import_lightning(kind.base):
                raise InvalidInput(
                    "ElasticStrategy brings its own loops: leave the Trainer's fit_loop as it was made."
                )
            loop.__class__ = _join(kind)
        loop.adapter = adapter


# ---- strategies


class _Elastic(_Joined):
    """What a strategy of Lightning's needs to be elastic, however it divides the work."""

    strategy_name = "elastic"
    restore_checkpoint_after_setup = True  # model and optimizers have their final types and places by then

    def __init__(self, commit_every: int, timeout: timedelta | None, **options: Any) -> None:
        if not hasattr(import_lightning(_ElasticFitLoop.base), "restarted_mid_epoch"):
            raise InvalidInput("ElasticStrategy needs Lightning 2.6 or newer: pip install -U lightning.")
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


class ElasticStrategy(_Elastic):
    """`Trainer(strategy=ElasticStrategy())`: a `fit` that survives the loss of workers, on CPUs or on GPUs.

    The rows come from one `ElasticDataLoader`, so that each comes once per epoch and weights do not depend on the
    world. `training_step` returns the mean loss of its rows; the gradients are then those of the mean over the rows of
    all ranks. Outside of a job, the Trainer trains in this process alone.
    """

    base = "strategies:DDPStrategy"

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


class ElasticModelParallelStrategy(_Elastic):
    """As `ElasticStrategy`, for a model of which no worker has the whole: `configure_model` of the LightningModule
    divides it by `fully_shard(part, mesh=self.device_mesh["data_parallel"])`, in each world anew."""

    base = "strategies:ModelParallelStrategy"

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


class _ElasticLauncher(_Joined):
    """Through it the Trainer calls what `fit`, `validate`, `test` and `predict` do."""

    base = "strategies.launchers.launcher:_Launcher"
    is_interactive_compatible = True

    def __init__(self, adapter: LightningFit) -> None:
        self._adapter = adapter

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **options: Any) -> Any:
        if trainer is not None and function == trainer._fit_impl:
            return self._adapter.fit(trainer, function, list(args))
        return function(*args, **options)

    def kill(self, signum: Any) -> None:
        """Nothing: the job owns the processes."""


class _ElasticEnvironment(_Joined):
    """The world of this worker, as it is now."""

    base = "plugins.environments:ClusterEnvironment"
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
