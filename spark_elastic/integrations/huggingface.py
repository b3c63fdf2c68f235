"""Elastic training by transformers: `ElasticTrainer`, `elastic_trainer` for any class of Trainers, and
`create_accelerator` for loops of Accelerate's.

In each world the Trainer's own `train` runs from the newest commit: this module gives it the process groups of that
world, the rows that the epoch has still to take, and the progress that the state has kept. What the Trainer does in
between, and everything around it, is the Trainer's. Training thread only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import new_class
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather, recursively_apply
from transformers import Trainer

from spark_elastic.checks import COUNT, make_choice
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.row_dataset import RowDataset
from spark_elastic.estimators.rows import Rows
from spark_elastic.gradients.devices import CPU
from spark_elastic.integrations.huggingface_adapter import (
    TrainerProgress,
    check_loop,
    check_training,
    initialize_on_rows,
)
from spark_elastic.integrations.trainer_adapter import leave_frozen_out
from spark_elastic.worker.context import get_context


class _OwnLoss(Trainer):  # type: ignore[misc]
    """The last class before `Trainer` in the order of an elastic trainer's."""

    _adapter: TrainerProgress

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        compute = partial(super().compute_loss, model, inputs, return_outputs)
        return self._adapter.loss.compute_own(compute, num_items_in_batch, return_outputs)


class ElasticTrainer(_OwnLoss):
    """`transformers.Trainer` whose `train` survives the loss of workers and takes each row once per epoch.

    A step takes `global_batch_size` rows over all ranks, whatever their number, so that weights do not depend on it.
    `per_device_train_batch_size` counts for nothing; with `gradient_accumulation_steps`, a step is that many times
    `global_batch_size` rows. The order of the rows follows from `args.data_seed`, or else `args.seed`.
    """

    current_flos: Any
    model: Any
    model_init: Any
    optimizer: Any
    train_dataset: Any
    _train_batch_size: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_loop(cls, ElasticTrainer)
        order = cls.__mro__
        between = order[order.index(_OwnLoss) + 1 : order.index(Trainer)]
        if between:  # such as SFTTrainer, and classes below it, whose compute_loss calls that of transformers
            cls.__bases__ = tuple(dict.fromkeys((*cls.__bases__, *between, _OwnLoss)))

    def __init__(
        self,
        *args: Any,
        global_batch_size: int,
        commit_every: int = 1,
        determinism: str | None = None,
        gather_rows: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """
        Args:
            args: those of the Trainer's class.
            global_batch_size: rows of a batch over all ranks.
            commit_every: optimizer steps from commit to commit. A loss repeats the steps since the newest one.
            determinism: "rows": what the data set draws for a row does not depend on the worker that reads it; see
                `ElasticDataLoader`.
            gather_rows: names of the model's outputs, and of inputs such as labels, that the loss gets for all rows of
                the step, and not for those of this rank; see `hvd.gather_rows`.
            options: those of the Trainer's class.

        Raises:
            InvalidInput: an argument is wrong, or the installed transformers is too old.
        """
        if not hasattr(Trainer, "_run_epoch"):
            raise InvalidInput("ElasticTrainer needs transformers 5.3 or newer: pip install -U transformers.")
        self.global_batch_size = COUNT("global_batch_size", global_batch_size)
        self.determinism = make_choice("rows").or_none()("determinism", determinism)
        self._adapter = TrainerProgress(self, commit_every, gather_rows)
        named = inspect.signature(super().__init__).bind_partial(*args, **options).arguments
        if isinstance(rows := named.get("train_dataset"), Rows | RowDataset):
            self.train_dataset = initialize_on_rows(super().__init__, rows, args, options)
        else:
            super().__init__(*args, **options)
        # Before the user's, which read what it puts right.
        self.callback_handler.callbacks.insert(0, self._adapter)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **options: Any) -> Any:
        """Train in world after world, until the last step.

        Args:
            resume_from_checkpoint: as for `Trainer.train`. A commit of this run is newer than it.
            trial: not supported.
            options: those of `Trainer.train`.

        Raises:
            InvalidInput: this kind of training cannot be elastic.
        """
        check_training(self, trial)
        self._adapter.loss.check_kinds()
        self._adapter.loss.takes_count = None
        loader = self._adapter.loader = self._adapter.make_loader()
        max_steps = self.set_initial_training_values(self.args, loader)[-1]
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        optimizer, scheduler, self._created_lr_scheduler = self.optimizer, self.lr_scheduler, False
        model_init, self.model_init = self.model_init, None  # the model lives through all worlds
        model, forward = self.model, self.model.__dict__.get("forward")

        def train() -> Any:
            self.model, self.optimizer = model, optimizer
            self._adapter.undo_preparation(forward)
            begins = not self._adapter.restore()
            self.args.__dict__.pop("_setup_devices", None)  # rank, size and device, by the process group
            _ = self.args.device
            GradientState._reset_state()
            self.create_accelerator_and_postprocess()
            check_distributed(self.accelerator)
            self._adapter.share_values()
            # An int until the first step, which a worker that joins after the last one never takes; the Trainer gathers
            # these numbers, so all ranks need one dtype.
            self.current_flos = float(self.current_flos)
            return super(ElasticTrainer, self).train(resume_from_checkpoint if begins else None, **options)

        def take_scheduler(*_: Any, **__: Any) -> Any:
            self._adapter.fill_model(self.args.device)
            return self.lr_scheduler

        # Methods of subclasses would make other ones in each world.
        lasting = {
            "get_train_dataloader": lambda: loader,
            "create_optimizer": lambda *_, **__: self.optimizer,
            "create_scheduler": take_scheduler,
        }
        self.__dict__.update(lasting)
        values = {} if self.args.fsdp else {"model": model, "optimizer": optimizer}
        if self.args.fsdp:
            self._adapter.divide(model, lambda: [optimizer], [optimizer])
        try:
            return self._adapter.train_in_worlds(train, **values, scheduler=scheduler, loader=loader)
        finally:
            self.model_init = model_init
            for name in lasting:
                delattr(self, name)

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.fsdp:
            check_fsdp(self.args)
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            divide_models(self.accelerator, self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    def training_step(self, *args: Any, **options: Any) -> Any:
        compute = self.compute_loss
        self.compute_loss = partial(self._adapter.loss.compute_weighted, compute)  # type: ignore[method-assign]
        gathering = self.model.register_forward_hook(self._adapter.loss.gather_outputs)
        try:
            loss = super().training_step(*args, **options)
        finally:
            gathering.remove()
            self.compute_loss = compute  # type: ignore[method-assign]
        self._adapter.loss.check_weighted()
        return loss

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **options: Any) -> Any:
        return super().get_batch_samples(self._adapter.loss.fetch(epoch_iterator), *args, **options)

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(*args, **options)
        return begun if self._adapter.pending is None else (self._adapter.restore_state(), 0)

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        with leave_frozen_out(self.model):
            prepared = super()._prepare_for_training(*args, **options)
        self._adapter.finish_world()
        return prepared

    def _run_epoch(self, *, epoch: int, resume_from_checkpoint: Any = None, **options: Any) -> None:
        """The rest of an epoch. The Trainer counts from the position on; `TrainerProgress` puts the epoch right."""
        loader = self._adapter.loader
        if self._adapter.has_ended or self.state.global_step >= self.state.max_steps > 0:
            self.control.should_training_stop = True
            return
        skipped = options.pop("steps_trained_in_current_epoch")
        if resume_from_checkpoint is not None and epoch == options["epochs_trained"]:
            loader.set_epoch(epoch)
            loader.step = skipped
            self._load_rng_state(resume_from_checkpoint)
        if epoch == loader.epoch and loader.step:
            options["steps_in_epoch"] -= loader.step
            options["num_update_steps_per_epoch"] -= loader.step // self.args.gradient_accumulation_steps
        options["steps_trained_in_current_epoch"] = 0
        super()._run_epoch(epoch=epoch, resume_from_checkpoint=None, **options)
        if loader.step == len(loader) or self.control.should_epoch_stop:
            loader.set_epoch(epoch + 1)
        self._adapter.commit()

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """What the Trainer does after a step, then the commit; an epoch's last one follows the epoch's end."""
        super()._maybe_log_save_evaluate(*args, **options)
        loader = self._adapter.loader
        stops = self.control.should_training_stop or self.control.should_epoch_stop
        if loader is not None and loader.step < len(loader) and self._adapter.is_due() and not stops:
            self._adapter.commit()


def elastic_trainer(kind: Any) -> type[Any]:
    """Return the elastic subclass of a Trainer's class, such as TRL's `SFTTrainer`: it takes that class's arguments and
    those of `ElasticTrainer`.

    Raises:
        InvalidInput: it is no subclass of `transformers.Trainer`, or has a training loop of its own.
    """
    is_class: bool = isinstance(kind, type)
    if not (is_class and issubclass(kind, Trainer)):
        name = kind.__name__ if is_class else f"{type(kind).__name__}, which is no class"
        raise InvalidInput(f"elastic_trainer() takes a subclass of transformers.Trainer; got {name}.")
    if kind is Trainer or issubclass(kind, ElasticTrainer):
        return ElasticTrainer if kind is Trainer else kind
    return _make_elastic(kind)


@cache
def _make_elastic(kind: Any) -> type[Any]:
    body = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    name, bases = f"Elastic{kind.__name__}", (ElasticTrainer, kind)
    return new_class(name, bases, exec_body=lambda own: own.update(body))


# ---- Accelerate


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
    """Prepare a new accelerator for its world; refuse one that would train on each worker alone."""
    if accelerator.device.type == "cpu":
        accelerator.state.device = CPU  # moving a module to Accelerate's "cpu:1" copies all of it
    worker = get_context()
    world = None if worker is None else worker.world
    if world is not None and accelerator.num_processes != world.size:
        raise InvalidInput(
            f"Accelerate takes each of the {world.size} workers for a training of its own, on {accelerator.device}: "
            "set device='cpu' or device='cuda' of the job, or ACCELERATE_USE_CPU=true on its workers."
        )
    if accelerator.num_processes > 1:
        # Not bound: only a collection would free it, with the models of its world.
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
    """Refuse `TrainingArguments` with fsdp by which another world could not divide the model again."""
    importlib.import_module("spark_elastic.handwritten.fsdp")  # needs torch 2.7
    config, parallel = args.fsdp_config, getattr(args, "parallelism_config", None)
    refused = {
        "FSDP1 (version=1)": int(config.get("version", 2)) != 2,
        "cpu_offload": bool(config.get("cpu_offload")),
        "xla": bool(config.get("xla")),
        "parallelism_config": parallel is not None and parallel.total_size > 1,
    }
    if name := next((name for name, is_set in refused.items() if is_set), None):
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
    """Have a new accelerator divide models by FSDP2: by itself it divides none on CPUs, and says nothing. options: of
    `FullyShardedDataParallelPlugin`."""
    state = accelerator.state
    if accelerator.device.type == "cpu":
        if not dist.is_initialized():
            dist.init_process_group()  # Accelerate takes one worker for none
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin.cpu_ram_efficient_loading = False  # all ranks have the model, or one without values
