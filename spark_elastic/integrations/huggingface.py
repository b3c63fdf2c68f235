"""Elastic training by Hugging Face's libraries: `ElasticTrainer` for transformers, `create_accelerator` for accelerate.

In each world the Trainer's own `train` runs from the newest commit: this module gives it the process groups of that
world, the rows that the epoch has still to take, and the progress that the state has kept. What the Trainer does in
between, and everything around it, is the Trainer's. Training thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler
from transformers import Trainer

from spark_elastic.checks import make_choice
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.rows import Rows
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.integrations.huggingface_adapter import TrainerProgress
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
    _check_distributed(accelerator)
    return accelerator


def _check_distributed(accelerator: Accelerator) -> None:
    worker = get_context()
    world = None if worker is None else worker.world
    if world is not None and accelerator.num_processes != world.size:
        raise InvalidInput(
            f"Accelerate takes each of the {world.size} workers for a training of its own, on {accelerator.device}: "
            "set device='cpu' or device='cuda' of the job, or ACCELERATE_USE_CPU=true on its workers."
        )


class ElasticTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose `train` survives the loss of workers and takes each row once per epoch.

    A step takes `global_batch_size` rows over all ranks, whatever their number, so that weights do not depend on it.
    `per_device_train_batch_size` counts for nothing; with `gradient_accumulation_steps`, a step is that many times
    `global_batch_size` rows. The order of the rows follows from `args.data_seed`, or else `args.seed`.
    """

    current_flos: Any
    model_init: Any
    optimizer: Any
    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        global_batch_size: int,
        commit_every: int = 1,
        determinism: str | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            args: those of `transformers.Trainer`.
            global_batch_size: rows of a batch over all ranks.
            commit_every: optimizer steps from commit to commit. A loss repeats the steps since the newest one.
            determinism: "rows": what the data set draws for a row does not depend on the worker that reads it; see
                `ElasticDataLoader`.
            options: those of `transformers.Trainer`.

        Raises:
            InvalidInput: an argument is wrong, or the installed transformers is too old.
        """
        if not hasattr(Trainer, "_run_epoch"):
            raise InvalidInput("ElasticTrainer needs transformers 5.3 or newer: pip install -U transformers.")
        self.global_batch_size = global_batch_size
        self.determinism = make_choice("rows").or_none()("determinism", determinism)
        self._adapter = TrainerProgress(self, commit_every)
        super().__init__(*args, **options)
        if isinstance(self.train_dataset, Rows):
            self.train_dataset = self.train_dataset.dataset()
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
        self._check_training(trial)
        self._adapter.takes_count = None
        loader = self._adapter.loader = self._make_loader()
        max_steps = self.set_initial_training_values(self.args, loader)[-1]
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        optimizer, self._created_lr_scheduler = self.optimizer, False
        model_init, self.model_init = self.model_init, None  # the model lives through all worlds
        forward = self.model.__dict__.get("forward")

        def train() -> Any:
            self._adapter.undo_preparation(forward)
            self.optimizer = optimizer
            begins = not self._adapter.restore()
            # Cached: rank, size and device, by the process group.
            self.args.__dict__.pop("_setup_devices", None)
            _ = self.args.device
            GradientState._reset_state()
            self.create_accelerator_and_postprocess()
            _check_distributed(self.accelerator)
            # An int until the first step, which a worker that joins after the last one never takes; the Trainer gathers
            # these numbers, so all ranks need one dtype.
            self.current_flos = float(self.current_flos)
            return super(ElasticTrainer, self).train(resume_from_checkpoint if begins else None, **options)

        try:
            return self._adapter.train_in_worlds(
                train, model=self.model, optimizer=optimizer, scheduler=self.lr_scheduler, loader=loader
            )
        finally:
            self.model_init = model_init

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader() if self._adapter.loader is None else self._adapter.loader

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        compute = partial(super().compute_loss, model, inputs, return_outputs)
        return self._adapter.compute_own(compute, num_items_in_batch, return_outputs)

    def training_step(self, *args: Any, **options: Any) -> Any:
        compute = self.compute_loss
        self.compute_loss = partial(self._adapter.compute_weighted, compute)  # type: ignore[method-assign]
        try:
            return super().training_step(*args, **options)
        finally:
            self.compute_loss = compute  # type: ignore[method-assign]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **options: Any) -> Any:
        return super().get_batch_samples(self._adapter.fetch(epoch_iterator), *args, **options)

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(*args, **options)
        return begun if self._adapter.pending is None else (self._adapter.restore_state(), 0)

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
        super()._run_epoch(
            epoch=epoch, resume_from_checkpoint=None, steps_trained_in_current_epoch=0, **options
        )
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

    def _make_loader(self) -> ElasticDataLoader:
        """A loader with the data set, collator and DataLoader settings that the Trainer would use."""
        if self.train_dataset is None:
            raise InvalidInput("ElasticTrainer has no train_dataset: pass one.")
        theirs = super().get_train_dataloader()
        _check_sampling(theirs)
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        names = ("persistent_workers", "prefetch_factor") if args.dataloader_num_workers else ()
        return ElasticDataLoader(
            theirs.dataset,
            self.global_batch_size,
            seed,
            drop_last=args.dataloader_drop_last,
            collate_fn=theirs.collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            determinism=self.determinism,
            **{name: getattr(args, f"dataloader_{name}") for name in names},
        )

    def _check_training(self, trial: Any) -> None:
        if trial is not None:
            raise InvalidInput(
                "ElasticTrainer searches no hyperparameters: start one training for each trial."
            )
        if getattr(self.args, "train_sampling_strategy", "random") != "random":
            raise InvalidInput(
                "ElasticTrainer gives each row once per epoch in an order of its own: leave train_sampling_strategy of "
                f"the TrainingArguments at 'random'; got {self.args.train_sampling_strategy!r}."
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InvalidInput(
                "ElasticTrainer trains with DistributedDataParallel only: remove fsdp and deepspeed from the "
                "TrainingArguments."
            )


def _check_sampling(loader: Any) -> None:
    """
    Raises:
        InvalidInput: the Trainer chooses rows, or puts them together, in a way of its own.
    """
    if isinstance(loader.dataset, IterableDataset):
        return  # has no sampler; `ElasticDataLoader` refuses it
    batches = loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # within Accelerate's, of one rank
    sampler = getattr(batches, "sampler", None)
    is_plain = getattr(type(batches), "__iter__", None) is BatchSampler.__iter__
    if is_plain and isinstance(sampler, RandomSampler) and not sampler.replacement:
        return
    raise InvalidInput(
        "ElasticTrainer gives each row once per epoch in an order of its own, and this Trainer's loader has a "
        f"{type(sampler if is_plain else batches).__name__}: leave samplers and batch samplers (such as batch_sampler "
        "and multi_dataset_batch_sampler of Sentence Transformers) as they are by default."
    )
