"""The loss of a rank's rows under a Hugging Face Trainer: normalized by a count of items over all ranks, if the model
takes that count; else weighted, so that the ranks' average is the mean of all rows.

Training thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer

from spark_elastic.errors import InvalidInput
from spark_elastic.horovod.torch.gathering import gather_rows
from spark_elastic.integrations.trainer_adapter import TrainerAdapter

log = logging.getLogger(__name__)


class RankLoss:
    """What one training makes of the losses of its batches."""

    def __init__(self, trainer: Any, adapter: TrainerAdapter, gathered: Sequence[str]) -> None:
        """gathered: names of outputs and inputs that the loss gets for the rows of all ranks."""
        self._trainer, self._adapter, self._gathered = trainer, adapter, gathered
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
        """The Trainer's own loss.

        The Trainer gives the count of items to each model whose forward takes **kwargs, and multiplies the loss by the
        number of ranks, as if every such model divided by that count: from one that averages by itself it is withheld.

        Args:
            compute: takes a count of items.
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
        """A mean over this rank's rows is weighted; a loss that is normalized over all ranks is not.

        Args:
            compute: the Trainer's `compute_loss`, which may be the user's own.
        """
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
        """Losses of Sentence Transformers say whether they compare rows, so that their result depends on the world.

        Raises:
            InvalidInput: one gathers rows itself, or goes through them in parts, besides `gather_rows`.
        """
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
                log.warning(
                    "%s compares the rows of one rank alone, so weights depend on the world: %s.",
                    name,
                    remedy,
                )

    def gather_outputs(self, model: Any, given: Any, outputs: Any) -> Any:
        """A forward hook."""
        return self._gather(outputs) if isinstance(outputs, Mapping) else outputs

    def _gather(self, named: Any) -> Any:
        if self._trainer.accelerator.num_processes > 1:
            for name in self._gathered:
                if isinstance(named.get(name), torch.Tensor):
                    named[name] = gather_rows(named[name])
        return named

    def check_weighted(self) -> None:
        """After a training step.

        Raises:
            InvalidInput: it has computed the loss in a way of its own.
        """
        if not self._weighted:
            raise InvalidInput(
                f"training_step() of {type(self._trainer).__name__} does not call self.compute_loss(), whose loss is "
                "weighted by this rank's rows: compute the loss there."
            )
        self._weighted = False


def list_modules(trainer: Trainer) -> Iterator[torch.nn.Module]:
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
