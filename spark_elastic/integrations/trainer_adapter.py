"""Another library's trainer on elastic workers, whichever it is: `TrainerAdapter`.

The adapter owns the worlds of one training, its commits, and what each rank's loss weighs. The trainer runs anew in
each world, so the newest commit waits until it can be restored. A trainer's own module says what its progress is, and
how to restore it. Training thread only.
"""

from __future__ import annotations

import gc
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.handwritten.torch_state import TorchState, run
from spark_elastic.runs.handlers import Registry, SnapshotHandler
from spark_elastic.runs.snapshot import Bytes, Kept, SnapshotBuilder

R = TypeVar("R")


class TrainerAdapter(ABC):
    """One training by a trainer, in world after world."""

    has_memory = False  # whether `capture` adds memory

    def __init__(self, commit_every: int) -> None:
        """commit_every: optimizer steps from commit to commit."""
        if commit_every < 1:
            raise InvalidInput(f"commit_every is {commit_every}: give a number of steps, at least 1.")
        self.commit_every = commit_every
        # An ElasticDataLoader, the rows of all epochs; None before the first training.
        self.loader: Any = None
        # What the worlds hand on, a `TrainerState`, or that of a divided model; None outside of training.
        self.state: Any = None
        self.divided: Any = None  # a `DividedModel`; None: each rank has the whole model
        # A commit (its values, their memory) that the trainer has not restored yet; None: live values are newer.
        self.pending: Any = None
        self.has_begun = False  # a world came before this one
        self._committed_step = 0

    @abstractmethod
    def capture(self, builder: SnapshotBuilder) -> Any:
        """The trainer's progress, as by `SnapshotHandler.capture`; None before it has any."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of optimizer steps that the trainer has made."""

    @abstractmethod
    def forget(self) -> None:
        """The trainer's live values are void: training begins, or goes back to a commit."""

    def list_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are no values of the state."""
        return []

    def list_kept(self) -> Mapping[Any, Kept]:
        """Copies of frozen parameters in its commits that this process has made itself, by key."""
        return {}

    def divide(self, model: torch.nn.Module, *described: Any) -> None:
        """The trainer will divide the model, which is whole yet, by FSDP2. described: see `DividedModel`."""
        # It needs torch 2.7.
        divided_models: Any = importlib.import_module("spark_elastic.integrations.divided_models")
        self.divided = divided_models.DividedModel(model, *described)

    def train_in_worlds(self, train: Callable[[], R], **values: Any) -> R:
        """Call `train`, which trains in one world from what `restore` has found, in world after world, until the last
        step. values: those of the state that stay through all worlds, such as model=."""
        self.pending, self.has_begun, self._committed_step = None, False, 0
        self.forget()
        make_state = TrainerState if self.divided is None else self.divided.make_state
        self.state = make_state(adapter=self, **values)
        # Trainers collect garbage as they begin in a world, and would visit all that this process has imported.
        gc.collect()
        gc.freeze()
        try:
            return run(lambda _: train())(self.state)
        finally:
            gc.unfreeze()
            self.state = None

    def restore(self) -> bool:
        """Go back to the newest commit, also where no worker was lost: the trainer makes everything again. Whether
        there is progress in it, which waits in `pending`."""
        assert self.state is not None
        if self.has_begun:
            self.state.restore()
        self.has_begun = True
        if self.divided is not None:
            self.divided.restore(with_values=not self.state.continues)
        return self.pending is not None

    # ---- a model that FSDP2 divides; without one these do nothing

    def share_values(self) -> None:
        """Have all ranks begin with the model of rank 0, which is not divided yet. Collective."""
        if self.divided is not None and not self.state.continues:
            self.divided.share_values()

    def fill_model(self, device: torch.device) -> None:
        """The model is divided now: give it memory."""
        if self.divided is not None:
            self.divided.fill(device)

    def finish_world(self) -> None:
        """Model and optimizers of this world are there: they take the values of the newest commit. Collective."""
        if self.divided is not None:
            self.state.finish_world()
            self.divided.drop_values()

    def finish_restoring(self) -> None:
        """The trainer has restored what was pending."""
        self.pending, self._committed_step = None, self.step

    def is_due(self) -> bool:
        """Whether a commit is due after what the trainer has just done: none is before a step ends."""
        return self.step // self.commit_every > self._committed_step // self.commit_every

    def commit(self) -> None:
        if self.state is not None:
            self._committed_step = self.step
            self.state.commit()

    @property
    def loss_weight(self) -> float:
        """By which the mean loss of the newest batch is multiplied: the ranks' average is then that of all rows."""
        return 1.0 if self.loader is None else self.loader.loss_weight


class AdapterHandler(SnapshotHandler):
    """A commit waits until the trainer restores it."""

    def capture(self, builder: SnapshotBuilder) -> Any:
        adapter: TrainerAdapter = self.value
        if adapter.pending is None:
            return None, adapter.capture(builder)
        values, memory = adapter.pending
        return None if memory is None else builder.add(memory), values

    def load(self, values: Any, memory: Bytes) -> None:
        adapter: TrainerAdapter = self.value
        adapter.forget()
        place, commit = values
        memory = memory if place is None else place.of(memory)
        adapter.pending = None if commit is None else (commit, memory.copy() if adapter.has_memory else None)


class OfTrainer(ObjectState):
    """A state with the adapter of a training, whose commits have the position of the loader."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, ElasticDataLoader) or super().__contains__(value)

    @property
    def registry(self) -> Registry:  # type: ignore[override] # looked up when the state is made
        return [(TrainerAdapter, AdapterHandler), *super().registry]


class TrainerState(OfTrainer, TorchState):
    """The state of a training: its adapter, and what all worlds keep."""

    def list_kept(self) -> dict[tuple[str, int, int], Kept]:
        return {**super().list_kept(), **self._handlers["adapter"].value.list_kept()}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [*super()._optimizers(), *self._handlers["adapter"].value.list_optimizers()]


@contextmanager
def leave_frozen_out(model: torch.nn.Module) -> Iterator[None]:
    """Inside, `DistributedDataParallel` sends no frozen parameters, which all ranks have alike already."""
    attribute = "_ddp_params_and_buffers_to_ignore"  # torch has no public name for it
    own = getattr(model, attribute, None)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    setattr(model, attribute, frozen | set(own or ()))
    try:
        yield
    finally:
        delattr(model, attribute)
        if own is not None:
            setattr(model, attribute, own)
