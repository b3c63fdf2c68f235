"""What a Hugging Face Trainer hands on from world to world, and what each world makes anew: `TrainerProgress`; the loss
of a rank's rows: `RankLoss`; and the rows in any world: what its own loader decides, as an `ElasticDataLoader`.

Data set, collator, settings of torch's DataLoader and the order are the Trainer's. A batch sampler, such as those of
Sentence Transformers, decides the rows of each step; what depends on the rank or cannot be repeated is refused by its
name. Training thread only.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from transformers.trainer_callback import ExportableState, TrainerCallback

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.row_dataset import RowDataset
from spark_elastic.estimators.rows import Rows
from spark_elastic.gradients.generators import get_generators, seeded_rng, set_generators
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.handwritten.object_state import get_session
from spark_elastic.horovod.torch.operations import gather_rows
from spark_elastic.integrations.trainer_adapter import TrainerAdapter
from spark_elastic.runs.snapshot import SnapshotBuilder

log = logging.getLogger(__name__)


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
        forward: the model's attribute before the first world; None: it had none of its own."""
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


# ---- the loss


class RankLoss:
    def __init__(self, trainer: Any, adapter: TrainerAdapter, gathered: Sequence[str]) -> None:
        # Names of outputs and inputs that the loss gets for the rows of all ranks.
        self._gathered = gathered
        self._trainer, self._adapter = trainer, adapter
        self._fetched: list[float] = []  # weights of the batches that were fetched and are not trained yet
        self._weighted = False  # the loss of the training step under way is
        # Whether the loss is computed with the Trainer's count of items; None: no training step has told.
        self.takes_count: bool | None = None

    def fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a step, which the Trainer trains once it has all."""
        self._fetched.clear()
        for batch in batches:
            self._fetched.append(self._adapter.loss_weight)
            yield batch

    def compute_own(self, compute: Callable[[Any], Any], count: Any, return_outputs: bool) -> Any:
        """The Trainer's own loss. compute: takes a count of items.

        The Trainer gives the count of items to each model whose forward takes **kwargs, and multiplies the loss by the
        number of ranks, as if every such model divided by that count: from one that averages by itself it is withheld.
        """
        count = None if self.takes_count is False else count
        result = compute(count)
        if self.takes_count is None and isinstance(count, torch.Tensor) and count.requires_grad:
            loss = result[0] if return_outputs else result
            self.takes_count = _depends_on(loss, count)
            trainer = self._trainer
            if not self.takes_count and trainer.args.average_tokens_across_devices:
                loss = loss / max(trainer.accelerator.num_processes, trainer.args.n_gpu)
                return (loss, *result[1:]) if return_outputs else loss
        return result

    def compute_weighted(
        self, compute: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        """A mean over this rank's rows is weighted; a loss that is normalized over all ranks is not. compute: the
        Trainer's `compute_loss`, which may be the user's own."""
        weight = self._fetched.pop(0) if self._fetched else self._adapter.loss_weight
        self._weighted, count = True, num_items_in_batch
        inputs = self._gather(inputs)
        if self.takes_count is False or self._gathered:  # which make a loss that all ranks have alike
            count = None
        elif self.takes_count is None and count is not None:
            count = torch.as_tensor(count).detach().float().requires_grad_()
        loss = compute(model, inputs, num_items_in_batch=count)
        if count is not None:
            if self.takes_count is None:  # by a `compute_loss` that does without the Trainer's
                self.takes_count = _depends_on(loss, count)
            if self.takes_count:
                return loss
        if num_items_in_batch is not None and getattr(self._trainer, "loss_is_scaled_for_ga", None) is None:
            # The Trainer believes that the count did this.
            weight /= self._trainer.current_gradient_accumulation_steps
        return loss * weight

    def check_kinds(self) -> None:
        """Losses of Sentence Transformers say whether they compare rows, so that their result depends on the world."""
        for loss in list_modules(self._trainer):
            name, across = type(loss).__name__, getattr(loss, "gather_across_devices", None)
            in_parts = across is not None and hasattr(loss, "mini_batch_size")
            if self._gathered and (across or in_parts):
                raise InvalidInput(
                    f"{name} gathers rows itself, or goes through them in parts: leave gather_rows out of the "
                    "arguments of the trainer, and let gather_across_devices be True."
                )
            if across is False and not self._gathered:
                remedy = "give the trainer gather_rows=('sentence_embedding', 'label')"
                remedy = "give it gather_across_devices=True" if in_parts else remedy
                sentence = "%s compares the rows of one rank alone, so weights depend on the world: %s."
                log.warning(sentence, name, remedy)

    def gather_outputs(self, model: Any, given: Any, outputs: Any) -> Any:
        return self._gather(outputs) if isinstance(outputs, Mapping) else outputs

    def _gather(self, named: Any) -> Any:
        if self._trainer.accelerator.num_processes > 1:
            for name in self._gathered:
                if isinstance(named.get(name), torch.Tensor):
                    named[name] = gather_rows(named[name])
        return named

    def check_weighted(self) -> None:
        """Refuse a training step that has computed the loss in a way of its own."""
        if not self._weighted:
            raise InvalidInput(
                f"training_step() of {type(self._trainer).__name__} does not call self.compute_loss(), whose loss is "
                "weighted by this rank's rows: compute the loss there."
            )
        self._weighted = False


def list_modules(trainer: Any) -> Iterator[torch.nn.Module]:
    """The modules that a Trainer keeps as attributes, or in a list or dict there, with all that are in them."""
    for value in vars(trainer).values():
        parts = list(value.values()) if isinstance(value, dict) else value
        for part in parts if isinstance(parts, list | tuple) else [value]:
            if isinstance(part, torch.nn.Module):
                yield from part.modules()


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


# ---- what is refused


def check_training(trainer: Any, trial: Any) -> None:
    if trial is not None:
        raise InvalidInput("ElasticTrainer searches no hyperparameters: start one training for each trial.")
    if trainer.is_deepspeed_enabled:
        raise InvalidInput(
            "ElasticTrainer trains by DistributedDataParallel or FSDP2: remove deepspeed from the TrainingArguments."
        )


def check_loop(kind: type[Any], elastic: type[Any]) -> None:
    """Refuse what replaces transformers' loop: it would train without commits, and each rank on rows of its own."""
    for parent in (parent for parent in kind.__mro__ if parent not in elastic.__mro__):
        for name in ("train", "_inner_training_loop", "_run_epoch"):
            code = getattr(inspect.unwrap(vars(parent).get(name, kind)), "__code__", None)
            if code is not None and "__class__" not in code.co_freevars:  # which super() needs
                raise InvalidInput(
                    f"{parent.__name__} has a training loop of its own, {name}(), in which no step could be committed: "
                    "write that loop by spark_elastic.torch.elastic, or call super() in it."
                )


# ---- the rows

# What torch's DataLoader keeps under the names of its arguments.
_KEPT: tuple[str, ...] = ("collate_fn", "num_workers", "timeout", "worker_init_fn", "multiprocessing_context")
_KEPT += ("prefetch_factor", "persistent_workers", "in_order")  # the last since torch 2.6


def make_elastic_loader(
    theirs: Any, global_batch_size: int, seed: int, determinism: str | None
) -> ElasticDataLoader:
    """theirs: the Trainer's, whose batches have `global_batch_size` rows. Refuses one that chooses rows, or puts them
    together, in a way that another world could not repeat."""
    kind = type(theirs)
    iterates = next((parent for parent in kind.__mro__ if "__iter__" in vars(parent)), kind)
    package = iterates.__module__.partition(".")[0]
    if not isinstance(theirs, DataLoader) or package not in ("torch", "accelerate"):
        raise InvalidInput(
            f"get_train_dataloader() returns a {kind.__name__}, which gives batches in a way of its own: return a "
            "torch DataLoader with its data set, collate_fn and sampler."
        )
    dataset, batches = theirs.dataset, theirs.batch_sampler
    while type(dataset).__module__.startswith("accelerate."):
        dataset = dataset.dataset  # type: ignore[attr-defined] # that of a rank
    batches = getattr(batches, "batch_sampler", batches)  # within Accelerate's, of one rank
    options = {name: getattr(theirs, name) for name in _KEPT if hasattr(theirs, name)}
    options |= {"pin_memory": theirs.pin_memory and torch.cuda.is_available(), "determinism": determinism}
    options |= {"drop_last": getattr(batches, "drop_last", False)}
    sampler = getattr(batches, "sampler", None)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):  # others are refused below
        if hasattr(batches, "set_epoch") and not _is_plain(batches):
            return SampledDataLoader(dataset, batches, global_batch_size, seed, **options)
        _check_sampler(batches, sampler, len(dataset))
    shuffle = not isinstance(sampler, SequentialSampler)
    return ElasticDataLoader(dataset, global_batch_size, seed, shuffle, **options)


def initialize_on_rows(initialize: Any, table: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a Trainer's `__init__` on rows of a table, its argument `train_dataset`. Returns the data set to train on.

    TRL's classes take a `datasets.Dataset` only: they get one that reads these rows, and keep what they make of it.
    """
    rows = table.dataset() if isinstance(table, Rows) else table
    shown = rows
    if any(kind.__module__.startswith("trl.") for kind in type(initialize.__self__).__mro__):
        shown = _make_hugging_face_dataset(rows)
    bound = inspect.signature(initialize).bind(*args, **options)
    bound.arguments["train_dataset"] = shown
    initialize(*bound.args, **bound.kwargs)
    prepared = initialize.__self__.train_dataset
    return rows if prepared is shown else prepared


def _make_hugging_face_dataset(rows: RowDataset) -> Any:
    datasets = importlib.import_module("datasets")

    def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        items = rows.__getitems__(batch["row"])
        return {name: [item[name] for item in items] for name in items[0]}

    return datasets.Dataset.from_dict({"row": np.arange(len(rows))}).with_transform(read)


def _is_plain(batches: Any) -> bool:
    return getattr(type(batches), "__iter__", None) is BatchSampler.__iter__


def _check_sampler(batches: Any, sampler: Any, rows: int) -> None:
    is_plain = _is_plain(batches)
    name = type(sampler if is_plain else batches).__name__
    if is_plain and isinstance(sampler, RandomSampler | SequentialSampler):
        if len(sampler) == rows and not getattr(sampler, "replacement", False):
            return
        name = f"{name} that does not take each of the {rows} rows once"
    raise InvalidInput(
        f"ElasticTrainer takes each row once per epoch, in any world, and this Trainer's loader has a {name}: leave "
        "samplers as they are by default, or give the DataLoader a batch sampler with set_epoch(epoch), as Sentence "
        "Transformers has."
    )


class SampledDataLoader(ElasticDataLoader):
    """An `ElasticDataLoader` whose steps are the batches of a batch sampler, which the ranks divide."""

    _follows_plan = False

    def __init__(self, dataset: Any, sampler: Any, global_batch_size: int, seed: int, **options: Any) -> None:
        """sampler: with batches of `global_batch_size` rows, over all ranks, that follow from `set_epoch`."""
        super().__init__(dataset, global_batch_size, seed, shuffle=False, **options)
        self._sampler = sampler
        self._drawn: tuple[int, list[list[int]]] = 0, self._draw(0)
        if self._draw(0) != self._drawn[1]:
            raise InvalidInput(
                f"{type(sampler).__name__} gives other batches each time it is asked for those of an epoch, so another "
                "worker cannot repeat them: let its set_epoch(epoch) seed whatever it draws from."
            )
        counts = len(self._drawn[1]), len(sampler)
        if counts[0] > counts[1]:  # the Trainer would leave rows out without a word
            log.warning(
                "%s makes %d batches of an epoch, of which the Trainer takes %d, as its len() says: the rows of "
                "the others are left out. For NO_DUPLICATES, lower global_batch_size or remove rows that are alike.",
                *(type(sampler).__name__, *counts),
            )

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._check_ranks()
        return super().__iter__()

    def _check_ranks(self) -> None:
        """Ranks that divide different batches would train some rows twice, and others never. Collective."""
        session = get_session()
        if session is None or session.group.size == 1:
            return
        session.wait_until_idle()
        digest = zlib.crc32(json.dumps(self._list_steps()).encode())
        if len({*session.group.allgather(np.array(digest)).tolist()}) > 1:
            raise InvalidInput(
                f"{type(self._sampler).__name__} gives each rank other batches, and ElasticTrainer divides each batch "
                "over the ranks: let it give batches of all ranks."
            )

    def _draw(self, epoch: int) -> list[list[int]]:
        self._sampler.set_epoch(epoch)
        with seeded_rng(self.seed, epoch):
            return [[int(row) for row in batch] for batch in self._sampler]

    def _list_steps(self) -> list[list[int]]:
        if self._drawn[0] != self.epoch:
            self._drawn = self.epoch, self._draw(self.epoch)
        return self._drawn[1]

    def _divide_steps(self, part: int, parts: int) -> Iterator[list[int]]:
        for rows in self._list_steps()[self.step :]:
            yield rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]

    def _count_rows(self) -> int:
        return len(self._list_steps()[self.step])

    def _count_fewest_rows(self) -> int:
        return min(map(len, self._list_steps()), default=0)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "batch_sampler": type(self._sampler).__name__}
