"""What a Hugging Face Trainer hands on from world to world, and what each world makes anew: `TrainerProgress`.

Training thread only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.generators import get_generators, set_generators
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.integrations.huggingface_loader import make_elastic_loader
from spark_elastic.integrations.huggingface_loss import RankLoss, list_modules
from spark_elastic.integrations.trainer_adapter import TrainerAdapter
from spark_elastic.runs.snapshot import SnapshotBuilder


class TrainerProgress(TrainerAdapter, TrainerCallback):  # type: ignore[misc]
    """Counters, logs, the scale of fp16, exportable callbacks and random generators of a Trainer.

    As a callback it puts right what the Trainer derives from a count of steps that begins with each world.
    """

    def __init__(self, trainer: Any, commit_every: int, gathered: Sequence[str] = ()) -> None:
        super().__init__(commit_every)
        self._trainer = trainer
        self.loss = RankLoss(trainer, self, gathered)
        self.has_ended = False  # a callback has ended the training, whose end may come in another world

    @property
    def step(self) -> int:
        return int(self._trainer.state.global_step)

    def forget(self) -> None:
        self._trainer.__dict__.pop("_tr_loss", None)
        self.has_ended = False

    def capture(self, builder: SnapshotBuilder) -> dict[str, Any] | None:
        trainer = self._trainer
        if not hasattr(trainer, "_tr_loss"):
            return None  # before the first step
        state = copy.copy(trainer.state)
        state.log_history = list(state.log_history)  # its entries stay as they are
        scaler = trainer.accelerator.scaler
        return {
            "state": state,
            "scaler": None if scaler is None else scaler.state_dict(),
            "loss": float(trainer._tr_loss),
            "logged loss": trainer._total_loss_scalar,
            "logged step": trainer._globalstep_last_logged,
            "stops": trainer.control.should_training_stop,
            "callbacks": [copy.deepcopy(each.state()["attributes"]) for each in self._list_exportable()],
            "random": get_generators(),
        }

    def make_loader(self) -> ElasticDataLoader:
        """The rows that the Trainer's own loader would give, with that one's collator and settings."""
        trainer, args = self._trainer, self._trainer.args
        own = args.per_device_train_batch_size, trainer._train_batch_size
        # Where a batch sampler decides the rows of a batch, it is that of all ranks.
        args.per_device_train_batch_size = trainer._train_batch_size = trainer.global_batch_size
        try:
            theirs = trainer.get_train_dataloader()
        finally:
            args.per_device_train_batch_size, trainer._train_batch_size = own
        seed = args.seed if args.data_seed is None else args.data_seed
        return make_elastic_loader(theirs, trainer.global_batch_size, seed, trainer.determinism)

    def restore_state(self) -> int:
        """What the Trainer has made anew before it prepares model and optimizer; returns the epoch."""
        trainer, values = self._trainer, self.pending[0]
        fresh, trainer.state = trainer.state, copy.copy(values["state"])
        trainer.state.log_history = list(trainer.state.log_history)
        for name in ("is_local_process_zero", "is_world_process_zero", "max_steps", "num_train_epochs"):
            setattr(trainer.state, name, getattr(fresh, name))
        for callback, attributes in zip(self._list_exportable(), values["callbacks"], strict=True):
            vars(callback).update(copy.deepcopy(attributes))
        if trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(values["scaler"])
        return int(self.loader.epoch)

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.pending is None:
            return
        trainer, values = self._trainer, self.pending[0]
        trainer._tr_loss.fill_(values["loss"])
        trainer._total_loss_scalar = values["logged loss"]
        trainer._globalstep_last_logged = values["logged step"]
        trainer._initial_global_step = 0
        self.has_ended = values["stops"]
        set_generators(values["random"])
        self.finish_restoring()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.loader is not None:
            state.epoch = self.loader.epoch + self.loader.step / len(self.loader)

    def undo_preparation(self, forward: Any) -> None:
        """Take away what the Trainer has made for a former world, which may have ended in the middle of its work.

        Args:
            forward: the model's attribute before the first world; None: it had none of its own.
        """
        trainer = self._trainer
        trainer.__dict__.pop("_eval_dataloaders", None)  # they have the rows of this rank in that world
        noise = trainer.__dict__.pop("neftune_hook_handle", None)
        if noise is not None:
            noise.remove()
        trainer.model.__dict__.pop("forward", None)  # that of mixed precision
        if forward is not None:
            trainer.model.forward = forward
        self._unwrap_model()

    def _unwrap_model(self) -> None:
        """Put the model back wherever a module of this Trainer, such as a loss of Sentence Transformers, keeps the
        wrapper of a former world: whoever put it there puts that of the new world there, too."""
        trainer = self._trainer
        wrapper, trainer.model_wrapped = trainer.model_wrapped, trainer.model
        if wrapper is trainer.model:
            return
        for holder in list(list_modules(trainer)):
            for attributes in (vars(holder), holder._modules):
                for name in [name for name, value in attributes.items() if value is wrapper]:
                    attributes[name] = trainer.model

    def _list_exportable(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def check_training(trainer: Any, trial: Any) -> None:
    """
    Args:
        trial: of `Trainer.train`.

    Raises:
        InvalidInput: this kind of training cannot be elastic.
    """
    if trial is not None:
        raise InvalidInput("ElasticTrainer searches no hyperparameters: start one training for each trial.")
    if getattr(trainer.args, "train_sampling_strategy", "random") not in ("random", "sequential"):
        raise InvalidInput(
            "ElasticTrainer gives each row once per epoch, in an order that no world changes: leave "
            "train_sampling_strategy of the TrainingArguments at 'random', or take 'sequential'; got "
            f"{trainer.args.train_sampling_strategy!r}."
        )
    if trainer.is_deepspeed_enabled:
        raise InvalidInput(
            "ElasticTrainer trains by DistributedDataParallel or FSDP2: remove deepspeed from the TrainingArguments."
        )


def check_loop(kind: type[Any], elastic: type[Any]) -> None:
    """What replaces transformers' loop would train without commits, and each rank on rows of its own.

    Raises:
        InvalidInput: a class does that.
    """
    for each in (each for each in kind.__mro__ if each not in elastic.__mro__):
        for name in ("train", "_inner_training_loop", "_run_epoch"):
            code = getattr(inspect.unwrap(vars(each).get(name, kind)), "__code__", None)
            if code is not None and "__class__" not in code.co_freevars:  # which super() needs
                raise InvalidInput(
                    f"{each.__name__} has a training loop of its own, {name}(), in which no step could be committed: "
                    "write that loop by spark_elastic.torch.elastic, or call super() in it."
                )
