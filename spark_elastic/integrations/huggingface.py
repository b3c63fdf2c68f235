"""Elastic training by Hugging Face's libraries: `ElasticTrainer` for transformers, `create_accelerator` for accelerate.

In each world the Trainer's own `train` runs from the newest commit: this module gives it the process groups of that
world, the rows that the epoch has still to take, and the progress that the state has kept. What the Trainer does in
between, and everything around it, is the Trainer's. Training thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback

from spark_elastic.checks import make_choice
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.generators import get_generators, set_generators
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.handwritten.torch_state import TorchState, get_handler_registry, run
from spark_elastic.runs.handlers import Registry, SnapshotHandler
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder
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

    # The Trainer's own.
    current_flos: Any
    current_gradient_accumulation_steps: int
    model_init: Any
    model_wrapped: Any
    optimizer: Any
    state: Any

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
        if commit_every < 1:
            raise InvalidInput(f"commit_every is {commit_every}: give a number of steps, at least 1.")
        self.global_batch_size = global_batch_size
        self.commit_every = commit_every
        self.determinism = make_choice("rows").or_none()("determinism", determinism)
        # The rows of all epochs; made by `train`.
        self._loader: ElasticDataLoader | None = None
        # What the worlds hand on; None outside of `train`.
        self._elastic_state: TorchState | None = None
        # What the newest commit knows of the training; None before the first one.
        self._committed: dict[str, Any] | None = None
        # ElasticDataLoader.loss_weight of the batches that were fetched and are not trained yet.
        self._loss_weights: list[float] = []
        # That of the newest batch.
        self._loss_weight = 1.0
        # Whether the loss is computed with the Trainer's count of items; None: no training step has told.
        self._takes_count: bool | None = None
        super().__init__(*args, **options)
        # Before the user's, which read what it puts right.
        self.callback_handler.callbacks.insert(0, _ElasticCallback(self))

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
        self._takes_count = None
        _forget_progress(self)
        self._loader = self._make_loader()
        max_steps = self.set_initial_training_values(self.args, self._loader)[-1]
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        optimizer, self._created_lr_scheduler = self.optimizer, False
        model_init, self.model_init = self.model_init, None  # the model lives through all worlds
        forward = self.model.__dict__.get("forward")
        state = _TrainingState(
            self.model,
            optimizer,
            scheduler=self.lr_scheduler,
            loader=self._loader,
            progress=_Progress(self),
        )

        @run
        def train_in_world(state: TorchState) -> Any:
            self._undo_preparation(forward)
            self.optimizer = optimizer
            self.args.__dict__.pop(
                "_setup_devices", None
            )  # cached: rank, size and device, by the process group
            _ = self.args.device
            GradientState._reset_state()
            self.create_accelerator_and_postprocess()
            _check_distributed(self.accelerator)
            # An int until the first step, which a worker that joins after the last one never takes; the Trainer gathers
            # these numbers, so all ranks need one dtype.
            self.current_flos = float(self.current_flos)
            begun = self._committed is not None
            if self._committed is not None and self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(self._committed["scaler"])
            return super(ElasticTrainer, self).train(None if begun else resume_from_checkpoint, **options)

        self._elastic_state = state
        try:
            return train_in_world(state)
        finally:
            self._elastic_state, self.model_init = None, model_init

    def _undo_preparation(self, forward: Any) -> None:
        """Take away what the Trainer has made for a former world, which may have ended in the middle of its work.

        Args:
            forward: the model's attribute before the first world; None: it had none of its own.
        """
        self.__dict__.pop("_eval_dataloaders", None)  # they have the rows of this rank in that world
        noise = self.__dict__.pop("neftune_hook_handle", None)
        if noise is not None:
            noise.remove()
        if forward is None:
            self.model.__dict__.pop("forward", None)  # that of mixed precision
        else:
            self.model.forward = forward
        self._unwrap_model()

    def _unwrap_model(self) -> None:
        """Put the model back wherever a module of this Trainer, such as a loss of Sentence Transformers, keeps the
        wrapper of a former world: whoever put it there puts that of the new world there, too."""
        wrapper, self.model_wrapped = self.model_wrapped, self.model
        if wrapper is self.model:
            return
        for holder in list(_list_modules(self)):
            for attributes in (vars(holder), holder._modules):
                for name in [name for name, value in attributes.items() if value is wrapper]:
                    attributes[name] = self.model

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader() if self._loader is None else self._loader

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss.

        The Trainer gives the count of items to each model whose forward takes **kwargs, and multiplies the loss by the
        number of ranks, as if every such model divided by that count: from one that averages by itself it is withheld.
        """
        count = None if self._takes_count is False else num_items_in_batch
        result = super().compute_loss(model, inputs, return_outputs, count)
        if self._takes_count is None and isinstance(count, torch.Tensor) and count.requires_grad:
            loss = result[0] if return_outputs else result
            self._takes_count = _depends_on(loss, count)
            if not self._takes_count and self.args.average_tokens_across_devices:
                loss = loss / max(self.accelerator.num_processes, self.args.n_gpu)
                return (loss, *result[1:]) if return_outputs else loss
        return result

    def _compute_weighted_loss(
        self, compute: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        """A mean over this rank's rows is weighted: the ranks' average is then that of all rows.

        Args:
            compute: `compute_loss`, which may be the user's own.
        """
        weight, count = self._loss_weight, num_items_in_batch
        if self._takes_count is False:
            count = None
        elif self._takes_count is None and count is not None:
            count = torch.as_tensor(count).detach().float().requires_grad_()
        loss = compute(model, inputs, num_items_in_batch=count)
        if count is not None:
            if self._takes_count is None:  # by a `compute_loss` that does without the Trainer's
                self._takes_count = _depends_on(loss, count)
            if self._takes_count:
                return loss  # normalized over all ranks already
        if num_items_in_batch is not None and getattr(self, "loss_is_scaled_for_ga", None) is None:
            weight /= self.current_gradient_accumulation_steps  # the Trainer believes that the count did this
        return loss * weight

    def training_step(self, *args: Any, **options: Any) -> Any:
        self._loss_weight = self._loss_weights.pop(0) if self._loss_weights else 1.0
        compute = self.compute_loss
        self.compute_loss = partial(self._compute_weighted_loss, compute)  # type: ignore[method-assign]
        try:
            return super().training_step(*args, **options)
        finally:
            self.compute_loss = compute  # type: ignore[method-assign]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **options: Any) -> Any:
        self._loss_weights.clear()
        return super().get_batch_samples(self._weigh(epoch_iterator), *args, **options)

    def _weigh(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self._loader is not None:
                self._loss_weights.append(self._loader.loss_weight)
            yield batch

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(*args, **options)
        if self._committed is None:
            return begun
        fresh, self.state = self.state, copy.copy(self._committed["state"])
        for name in ("is_local_process_zero", "is_world_process_zero", "max_steps", "num_train_epochs"):
            setattr(self.state, name, getattr(fresh, name))
        assert self._loader is not None
        return self._loader.epoch, 0

    def _run_epoch(self, *, epoch: int, resume_from_checkpoint: Any = None, **options: Any) -> None:
        """The rest of an epoch. The Trainer counts from the position on; `_ElasticCallback` puts the epoch right."""
        loader = self._loader
        assert loader is not None
        ended = self._committed is not None and self._committed["stops"]
        if ended or self.state.global_step >= self.state.max_steps > 0:
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
        self._commit()

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """What the Trainer does after a step, then the commit; an epoch's last one follows the epoch's end."""
        super()._maybe_log_save_evaluate(*args, **options)
        loader = self._loader
        stops = self.control.should_training_stop or self.control.should_epoch_stop
        due = self.state.global_step % self.commit_every == 0
        if loader is not None and loader.step < len(loader) and due and not stops:
            self._commit()

    def _commit(self) -> None:
        if self._elastic_state is not None:
            self._elastic_state.commit()

    def _make_loader(self) -> ElasticDataLoader:
        """A loader with the data set, collator and DataLoader settings that the Trainer would use."""
        if self.train_dataset is None:
            raise InvalidInput("ElasticTrainer has no train_dataset: pass one.")
        theirs = super().get_train_dataloader()
        _check_sampling(theirs)
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        workers = (
            {
                "persistent_workers": args.dataloader_persistent_workers,
                "prefetch_factor": args.dataloader_prefetch_factor,
            }
            if args.dataloader_num_workers
            else {}
        )
        return ElasticDataLoader(
            theirs.dataset,
            self.global_batch_size,
            seed,
            drop_last=args.dataloader_drop_last,
            collate_fn=theirs.collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            determinism=self.determinism,
            **workers,
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


class _ElasticCallback(TrainerCallback):  # type: ignore[misc]
    """Puts right what the Trainer derives from a count of steps that begins with each world."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        trainer = self._trainer
        if trainer._committed is not None:
            trainer._tr_loss.fill_(trainer._committed["loss"])
            trainer._total_loss_scalar = trainer._committed["logged loss"]
            trainer._globalstep_last_logged = trainer._committed["logged step"]
            trainer._initial_global_step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        loader = self._trainer._loader
        if loader is not None:
            state.epoch = loader.epoch + loader.step / len(loader)


class _Progress:
    """The Trainer's own progress, as a value of the state."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self.trainer = trainer


class _ProgressHandler(SnapshotHandler):
    """Counters, logs, the scale of fp16, exportable callbacks and random generators of a Trainer."""

    def capture(self, builder: SnapshotBuilder) -> Any:
        trainer: ElasticTrainer = self.value.trainer
        if not hasattr(trainer, "_tr_loss"):
            return None  # before the first step
        state = copy.copy(trainer.state)
        state.log_history = list(state.log_history)  # its entries stay as they are
        scaler = trainer.accelerator.scaler
        trainer._committed = {
            "state": state,
            "scaler": None if scaler is None else scaler.state_dict(),
            "loss": float(trainer._tr_loss),
            "logged loss": trainer._total_loss_scalar,
            "logged step": trainer._globalstep_last_logged,
            # A callback has ended the training, whose end may come in another world.
            "stops": trainer.control.should_training_stop,
            "callbacks": [
                copy.deepcopy(callback.state()["attributes"])
                for callback in _list_exportable(trainer.callback_handler)
            ],
            "random": get_generators(),
        }
        return trainer._committed

    def load(self, values: Any, memory: Bytes) -> None:
        trainer: ElasticTrainer = self.value.trainer
        if values is None:
            _forget_progress(trainer)
            return
        trainer._committed = values
        trainer.state = copy.copy(values["state"])
        trainer.state.log_history = list(trainer.state.log_history)
        for callback, attributes in zip(
            _list_exportable(trainer.callback_handler), values["callbacks"], strict=True
        ):
            vars(callback).update(copy.deepcopy(attributes))
        set_generators(values["random"])


class _TrainingState(TorchState):
    @property
    def registry(self) -> Registry:  # type: ignore[override] # looked up when the state is made
        return [(_Progress, _ProgressHandler), *get_handler_registry()]


def _forget_progress(trainer: ElasticTrainer) -> None:
    trainer._committed = None
    trainer.__dict__.pop("_tr_loss", None)


def _list_modules(trainer: Trainer) -> Iterator[torch.nn.Module]:
    """The modules that a Trainer keeps as attributes, or in a list or dict there, with all that are in them."""
    for value in vars(trainer).values():
        parts = [value] if isinstance(value, torch.nn.Module) else value
        parts = list(parts.values()) if isinstance(parts, dict) else parts
        for part in parts if isinstance(parts, list | tuple) else ():
            if isinstance(part, torch.nn.Module):
                yield from part.modules()


def _check_sampling(loader: Any) -> None:
    """
    Raises:
        InvalidInput: the Trainer chooses rows, or puts them together, in a way of its own.
    """
    if isinstance(loader.dataset, IterableDataset):
        return  # has no sampler; `ElasticDataLoader` refuses it
    batches = getattr(
        loader.batch_sampler, "batch_sampler", loader.batch_sampler
    )  # within Accelerate's, of one rank
    sampler = getattr(batches, "sampler", None)
    is_plain = getattr(type(batches), "__iter__", None) is BatchSampler.__iter__
    if is_plain and isinstance(sampler, RandomSampler) and not sampler.replacement:
        return
    raise InvalidInput(
        "ElasticTrainer gives each row once per epoch in an order of its own, and this Trainer's loader has a "
        f"{type(sampler if is_plain else batches).__name__}: leave samplers and batch samplers (such as batch_sampler "
        "and multi_dataset_batch_sampler of Sentence Transformers) as they are by default."
    )


def _depends_on(loss: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether the graph of a loss reaches that tensor."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if getattr(node, "variable", None) is leaf:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return False


def _list_exportable(handler: CallbackHandler) -> list[Any]:
    return [callback for callback in handler.callbacks if isinstance(callback, ExportableState)]
