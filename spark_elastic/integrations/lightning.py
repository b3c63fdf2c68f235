"""Elastic training by Lightning's Trainer: `ElasticStrategy`, for the packages `lightning` and `pytorch_lightning`.

In each world the Trainer's own `fit` runs from the newest commit, which is a checkpoint of Lightning's kept in memory:
the Trainer restores callbacks, loops, schedulers and the position of the data as from a file, this module model and
optimizers. It takes the package that the program has imported, `lightning` if it has imported none. Training thread
only.
"""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import CPU
from spark_elastic.gradients.generators import get_generators, set_generators
from spark_elastic.gradients.ranks import local_rank, rank, size
from spark_elastic.handwritten.applied_gradients import mark_applied
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.handwritten.torch_state import TorchState, forget_gradients, get_handler_registry, run
from spark_elastic.runs.handlers import Registry, SnapshotHandler
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder, pickle_value
from spark_elastic.training.torch.module_state import ModelStateHandler, OptimizerStateHandler
from spark_elastic.worker.context import get_context


def _choose_package() -> str:
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return "pytorch_lightning"
    return "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"


def _import(module: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{module}")


_PACKAGE = _choose_package()
try:
    _ClusterEnvironment: Any = _import("plugins.environments").ClusterEnvironment
    _DDPStrategy: Any = _import("strategies").DDPStrategy
    _Launcher: Any = _import("strategies.launchers.launcher")._Launcher
    _EpochLoop: Any = _import("loops.training_epoch_loop")._TrainingEpochLoop
    _FitLoop: Any = _import("loops.fit_loop")._FitLoop
    _ = _FitLoop.restarted_mid_epoch
except AttributeError:
    raise InvalidInput("ElasticStrategy needs Lightning 2.6 or newer: pip install -U lightning.") from None

_COMMIT = "the newest commit, in memory"  # in place of a checkpoint's path
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters.keys() - {"self", "module"}


class ElasticStrategy(_DDPStrategy):  # type: ignore[misc]
    """`Trainer(strategy=ElasticStrategy())`: a `fit` that survives the loss of workers, on CPUs or on GPUs.

    The rows come from one `ElasticDataLoader`, so that each comes once per epoch and weights do not depend on the
    world. `training_step` returns the mean loss of its rows; the gradients are then those of the mean over the rows of
    all ranks. Outside of a job, the Trainer trains in this process alone.
    """

    strategy_name = "elastic"

    def __init__(self, commit_every: int = 1, timeout: timedelta | None = None, **options: Any) -> None:
        """
        Args:
            commit_every: optimizer steps from commit to commit. A loss repeats the steps since the newest one.
            timeout: how long a collective waits for a rank that is alive; None takes torch's default.
            options: those of DistributedDataParallel.

        Raises:
            InvalidInput: an argument is wrong.
        """
        if commit_every < 1:
            raise InvalidInput(f"commit_every is {commit_every}: give a number of steps, at least 1.")
        for name in options.keys() - _DDP_OPTIONS:
            raise InvalidInput(
                f"ElasticStrategy has no option {name!r}: it takes those of DistributedDataParallel, as in "
                "ElasticStrategy(find_unused_parameters=True)."
            )
        waits = {} if timeout is None else {"timeout": timeout}
        super().__init__(cluster_environment=_ElasticEnvironment(), **waits, **options)
        self.commit_every = commit_every
        self._trainer: Any = None  # that of the `fit` under way
        self._state: TorchState | None = None  # what the worlds hand on; None outside of `fit`
        # Of this world's model and optimizers; None before Lightning has made them.
        self._handlers: tuple[ModelStateHandler, list[OptimizerStateHandler]] | None = None
        # A commit (its values, their memory) that the Trainer has not restored yet; None: live values are newer.
        self._pending: tuple[dict[str, Any], Bytes] | None = None
        self._generators: tuple[Any, ...] | None = None  # to be set when training begins; None: as they are
        self.resumes_commit = (
            False  # in this world the Trainer has begun with a commit, and trained no batch yet
        )

    # ---- where this process is

    @property
    def root_device(self) -> torch.device:
        device: torch.device = (self.parallel_devices or [CPU])[0]
        return device

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
        self._launcher = _ElasticLauncher(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        if get_context() is not None and not dist.is_initialized():
            dist.init_process_group(timeout=self._timeout)

    def configure_ddp(self) -> None:
        if dist.is_initialized():
            self._wrapped_for = self._list_trained()
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

    # ---- one `fit` over all worlds

    def fit_in_worlds(self, trainer: Any, fit: Callable[..., Any], arguments: list[Any]) -> Any:
        """Run a Trainer's `fit` in world after world, until the last step.

        Args:
            arguments: those of `fit`; one of them is the path of a checkpoint, which counts until the first commit.
        """
        self._trainer, self._pending, self._handlers = trainer, None, None
        self._committed_step = 0  # also if training begins in mid-run, from a checkpoint's file
        _replace_loops(trainer, self)
        place = list(inspect.signature(fit).parameters).index("ckpt_path")
        has_begun = False

        @run
        def fit_in_world(state: TorchState) -> Any:
            nonlocal has_begun
            if has_begun:
                trainer.training = True  # the world may have ended in a validation
                trainer._teardown()  # Lightning's own end of what the former world had
            has_begun = True
            state.restore()  # the newest commit: Lightning makes everything again, also where no worker was lost
            given, self.resumes_commit = list(arguments), self._pending is not None
            if self.resumes_commit:
                given[place] = _COMMIT
            return fit(*given)

        self._state = _FitState(fit=_Fit(self))
        try:
            return fit_in_world(self._state)
        finally:
            self._state = None

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self._state is not None:
            model = ModelStateHandler(self.lightning_module)
            optimizers = [OptimizerStateHandler(optimizer) for optimizer in self.optimizers]
            model.keeps_frozen = True
            model.trained = {
                id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]
            }
            for optimizer in optimizers:
                optimizer.list_parameters = self.lightning_module.named_parameters
            self._handlers = model, optimizers
            self._state._hooked.clear()
            scaler = getattr(self.precision_plugin, "scaler", None)
            if scaler is not None:
                forget_gradients(scaler)

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._state is not None and self._trainer.training:
            if not isinstance(dataloader, ElasticDataLoader):
                raise InvalidInput(
                    f"ElasticStrategy trains on an ElasticDataLoader, and got a {type(dataloader).__name__}: make it "
                    "by ElasticDataLoader(dataset, global_batch_size)."
                )
            self._state._loader = dataloader
        return dataloader

    def backward(self, closure_loss: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Weighted by this rank's part of the step's rows: the ranks' average is then that of all rows."""
        loader = getattr(self._state, "_loader", None)
        if loader is not None:
            closure_loss = closure_loss * loader.loss_weight
        return super().backward(closure_loss, *args, **options)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **options)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            mark_applied(optimizer)  # also where the scaler of fp16 has skipped the step: it is over
        return result

    # ---- commits

    def is_due(self, step: int) -> bool:
        """Whether a commit is due after the batch that has brought training to `step`: none is before a step ends."""
        due: bool = step // self.commit_every > self._committed_step // self.commit_every
        return due

    def commit(self) -> None:
        if self._state is not None:
            self._committed_step = self._trainer.global_step
            self._state.commit()

    def capture(self, builder: SnapshotBuilder) -> dict[str, Any] | None:
        """Everything that a checkpoint of Lightning holds; None before the model is set up."""
        if self._handlers is None:
            return None
        trainer, (model, optimizers) = self._trainer, self._handlers
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["state_dict"], checkpoint["optimizer_states"]
        connector = trainer._logger_connector
        return {
            "model": model.capture(builder),
            "optimizers": [optimizer.capture(builder) for optimizer in optimizers],
            "rest": pickle_value(
                {
                    "checkpoint": checkpoint,
                    "generators": get_generators(),
                    "should stop": trainer.should_stop,
                    "position": self._get_loader().state_dict(),
                    "metrics": (dict(connector._callback_metrics), dict(connector._logged_metrics)),
                }
            ),
        }

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # model and optimizers have their final types and places by then

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if checkpoint_path != _COMMIT:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return loaded
        assert self._pending is not None
        assert self._handlers is not None
        values, memory = self._pending
        model, optimizers = self._handlers
        model.load(values["model"], memory)
        for optimizer, saved in zip(optimizers, values["optimizers"], strict=True):
            optimizer.load(saved, memory)
        checkpoint: dict[str, Any] = pickle.loads(values["rest"])["checkpoint"]
        return {**checkpoint, "state_dict": self.lightning_module.state_dict(), "optimizer_states": []}

    def finish_restoring(self) -> None:
        """The Trainer has restored what a checkpoint of Lightning holds; here is the rest."""
        if self._pending is None:
            return
        rest, self._pending = pickle.loads(self._pending[0]["rest"]), None
        self._trainer.should_stop = rest["should stop"]
        self._committed_step = self._trainer.global_step
        connector = self._trainer._logger_connector
        connector._callback_metrics, connector._logged_metrics = rest["metrics"]
        self._get_loader().load_state_dict(rest["position"])
        iter(self._trainer.fit_loop._data_fetcher)  # from that position on
        self._generators = rest["generators"]

    def restore_generators(self) -> None:
        if self._generators is not None:
            set_generators(self._generators)
            self._generators = None

    def _get_loader(self) -> ElasticDataLoader:
        loader: ElasticDataLoader = self._state._loader  # type: ignore[union-attr]
        return loader

    def enter_epoch(self, epoch: int) -> bool:
        """Whether the loader was in an earlier one: Lightning stops at the last batch, and may make new loaders."""
        loader = self._get_loader()
        if loader.epoch >= epoch:
            return False
        loader.set_epoch(epoch)
        return True


class _ElasticFitLoop(_FitLoop):  # type: ignore[misc]
    """Lightning's loop over epochs; commits at the start of training and at the end of each epoch."""

    strategy: ElasticStrategy

    def run(self) -> None:
        self.setup_data()
        self.strategy.finish_restoring()
        super().run()

    def on_run_start(self) -> None:
        super().on_run_start()
        if self.strategy.resumes_commit:
            self.strategy.restore_generators()
        elif (
            not self.restarting
        ):  # from a checkpoint's file, whose counters fit no commit before the first step
            self.strategy.commit()

    def on_advance_start(self) -> None:
        super().on_advance_start()
        if self.strategy.enter_epoch(self.epoch_progress.current.processed):
            iter(self._data_fetcher)

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.strategy.enter_epoch(self.epoch_progress.current.processed)
        self.strategy.commit()


class _ElasticEpochLoop(_EpochLoop):  # type: ignore[misc]
    """Lightning's loop over batches; commits between two of them, after all that Lightning does for the first."""

    strategy: ElasticStrategy

    def reset(self) -> None:
        if self.strategy.resumes_commit and self._num_ready_batches_reached():
            self.restarting = False  # the commit followed an epoch's end, and this is the next epoch
        super().reset()

    def advance(self, data_fetcher: Any) -> None:
        if self.strategy.resumes_commit:
            # Nothing of the batch before is left to be done, such as its validation.
            self.strategy.resumes_commit = self.trainer.fit_loop.restarting = False
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        super().on_advance_end(data_fetcher)
        if self.strategy.is_due(self.global_step) and not self.done:
            self.strategy.commit()


def _replace_loops(trainer: Any, strategy: ElasticStrategy) -> None:
    """Give a Trainer the loops that commit, in the state of its own."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if not isinstance(fit, _ElasticFitLoop):
        if type(fit) is not _FitLoop or type(epoch) is not _EpochLoop:
            raise InvalidInput(
                "ElasticStrategy brings its own loops: leave the Trainer's fit_loop as it was made."
            )
        fit.__class__, epoch.__class__ = _ElasticFitLoop, _ElasticEpochLoop
    fit.strategy = epoch.strategy = strategy


class _ElasticLauncher(_Launcher):  # type: ignore[misc]
    """Through it the Trainer calls what `fit`, `validate`, `test` and `predict` do."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **options: Any) -> Any:
        if trainer is not None and function == trainer._fit_impl:
            return self._strategy.fit_in_worlds(trainer, function, list(args))
        return function(*args, **options)

    def kill(self, signum: Any) -> None:
        """Nothing: the job owns the processes."""


class _ElasticEnvironment(_ClusterEnvironment):  # type: ignore[misc]
    """The world of this worker, as it is now."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # there is no such port: torch's store is the driver's

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return size()

    def global_rank(self) -> int:
        return rank()

    def local_rank(self) -> int:
        return local_rank()

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        """Nothing: the job decides."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the job decides."""


class _Fit:
    """A `fit` under way, as the one value of its state."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        self.strategy = strategy


class _FitHandler(SnapshotHandler):
    """A commit waits until the Trainer restores it, since model and optimizers are made again in each world."""

    def capture(self, builder: SnapshotBuilder) -> Any:
        strategy: ElasticStrategy = self.value.strategy
        if strategy._pending is None:
            return None, strategy.capture(builder)
        values, memory = strategy._pending
        return builder.add(memory), values

    def load(self, values: Any, memory: Bytes) -> None:
        place, commit = values
        if place is not None:
            memory = memory[place.offset : place.offset + place.nbytes]
        strategy: ElasticStrategy = self.value.strategy
        strategy._handlers = None  # the live values are void
        strategy._pending = None if commit is None else (commit, memory.copy())


class _FitState(TorchState):
    def __contains__(self, value: object) -> bool:
        return isinstance(value, ElasticDataLoader) or super().__contains__(
            value
        )  # Lightning's commits have its position

    @property
    def registry(self) -> Registry:  # type: ignore[override] # looked up when the state is made
        return [(_Fit, _FitHandler), *get_handler_registry()]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        strategy: ElasticStrategy = self._handlers["fit"].value.strategy
        return [] if strategy._handlers is None else list(strategy.optimizers)
