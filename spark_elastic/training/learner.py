"""What the training loop asks of a framework: a state, a step, its callbacks. Only shapes of things; no thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.protocol.types import Position
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.trailer import Verdict

Objects = Mapping[str, bytes]


class TrainingState(Protocol):
    """Everything that a newcomer receives and a checkpoint holds; `extras` are the loop's and the learner's values."""

    position: Position
    extras: dict[str, Any]

    def sync(self, group: Group, source: int, receivers: Sequence[int]) -> Position:
        """Hand the state of rank `source` to `receivers`; collective over the whole group."""
        ...

    def copied(self) -> Callable[[], Objects]:
        """Copy the whole state. Returns a function that makes it into objects by name, in any thread."""
        ...

    def restore(self, objects: Objects) -> None:
        """Take over what such a function made, with its position."""
        ...

    def digest(self) -> str:
        """A checksum of all weights and optimizer values, equal on every replica (P4)."""
        ...


class Hooks(Protocol):
    """The user's callbacks, called at the right moments."""

    def begins(self, group: Group) -> None:
        """Once, in the first world, before a state is taken over: what callbacks set as they begin gives way to it."""
        ...

    def world(self, group: Group) -> None:
        """A world begins."""
        ...

    def epoch_begins(self, epoch: int) -> None: ...

    def step_begins(self, epoch: int, step: int) -> None: ...

    def applied(self) -> None:
        """A step is being applied; called inside its apply section."""
        ...

    def step_sealed(self, logs: Mapping[str, Any]) -> None:
        """logs: epoch, step, loss, rows of a step that is history."""
        ...

    def ends(self) -> bool:
        """Whether a callback wants training to end after the step under way."""
        ...

    def epoch_ends(self, group: Group, logs: Mapping[str, Any]) -> str | None:
        """Why training is to end, or None. A CollectiveError leaves the callbacks as they were."""
        ...

    def fit_ends(self, history: list[dict[str, Any]]) -> None: ...


class Learner(Protocol):
    """A model in training. Made by the user's process, prepared in a worker; main thread only.

    A step or an evaluation either is applied, or leaves everything as it was and raises.
    """

    @property
    def state(self) -> TrainingState: ...

    @property
    def hooks(self) -> Hooks: ...

    def prepare(self, extras: dict[str, Any], ledger: Ledger) -> None:
        """extras: the loop's, to become the state's."""
        ...

    def take(
        self,
        group: Group,
        rows: StepRows,
        version: int,
        after: Callable[[Verdict], Position],
        before_apply: Callable[[], None],
    ) -> Verdict:
        """One step; what the hooks' `ends` says travels with it (R6). version: newest membership version heard of.
        before_apply: called once the exchange is complete. after: part of the apply section; accounts for the verdict
        and returns the next position."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """A context around the evaluations of one epoch."""
        ...

    def evaluate(self, group: Group, rows: StepRows, version: int) -> Verdict:
        """One step of validation, its exchange included; the position stays."""
        ...

    def numbers(self) -> dict[str, Any]:
        """The numbers of the epoch that is over: metrics, learning rate."""
        ...

    def reset(self) -> None:
        """Begin the next epoch's numbers."""
        ...

    def world_dependence(self) -> str | None:
        """R9: what makes the weights depend on the number of workers, in a sentence; None: nothing."""
        ...

    def weights(self) -> bytes:
        """The final model's weights, in the form in which the store keeps them."""
        ...

    def close(self) -> None: ...
