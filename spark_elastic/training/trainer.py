"""What the training loop asks of a framework: a state, a step, its callbacks. Only shapes of things; no thread."""

from __future__ import annotations

import signal
import threading
import zlib
from _signal import signal as set_handler  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.errors import StoreError
from spark_elastic.protocol.types import Position
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.step_summary import StepDecision

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


class CallbackList(Protocol):
    """The user's callbacks, called at the right moments."""

    def on_fit_begin(self, group: Group) -> None:
        """Once, in the first world, before a state is taken over: what callbacks set as they begin gives way to it."""
        ...

    def on_world_begin(self, group: Group) -> None:
        """A world begins."""
        ...

    def on_epoch_begin(self, epoch: int) -> None: ...

    def on_step_begin(self, epoch: int, step: int) -> None: ...

    def on_step_applied(self) -> None:
        """A step is being applied; called inside its apply section."""
        ...

    def on_step_finalized(self, logs: Mapping[str, Any]) -> None:
        """logs: epoch, step, loss, rows of a step that is history."""
        ...

    def wants_stop(self) -> bool:
        """Whether a callback wants training to end after the step under way."""
        ...

    def on_epoch_end(self, group: Group, logs: Mapping[str, Any]) -> str | None:
        """Why training is to end, or None. A CollectiveError leaves the callbacks as they were."""
        ...

    def on_fit_end(self, history: list[dict[str, Any]]) -> None: ...


class ModelTrainer(Protocol):
    """A model in training. Made by the user's process, prepared in a worker; main thread only.

    A step or an evaluation either is applied, or leaves everything as it was and raises.
    """

    @property
    def state(self) -> TrainingState: ...

    @property
    def callbacks(self) -> CallbackList: ...

    def prepare(self, extras: dict[str, Any], ledger: Ledger) -> None:
        """extras: the loop's, to become the state's."""
        ...

    def train_step(
        self,
        group: Group,
        rows: StepRows,
        version: int,
        after: Callable[[StepDecision], Position],
        before_apply: Callable[[], None],
    ) -> StepDecision:
        """One step; what the hooks' `ends` says travels with it (R6). version: newest membership version heard of.
        before_apply: called once the exchange is complete. after: part of the apply section; accounts for the decision
        and returns the next position."""
        ...

    def validation_mode(self) -> AbstractContextManager[None]:
        """A context around the evaluations of one epoch."""
        ...

    def validation_step(self, group: Group, rows: StepRows, version: int) -> StepDecision:
        """One step of validation, its exchange included; the position stays."""
        ...

    def epoch_metrics(self) -> dict[str, Any]:
        """The numbers of the epoch that is over: metrics, learning rate."""
        ...

    def reset_metrics(self) -> None:
        """Begin the next epoch's numbers."""
        ...

    def describe_world_dependence(self) -> str | None:
        """R9: what makes the weights depend on the number of workers, in a sentence; None: nothing."""
        ...

    def export_weights(self) -> bytes:
        """The final model's weights, in the form in which the store keeps them."""
        ...

    def close(self) -> None: ...


# The apply section of a step, which nothing interrupts (R1). Main thread; elsewhere nothing interrupts anyway.


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Ctrl-C and its like wait until the block is through."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    former = set_handler(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        set_handler(signal.SIGINT, former)
        for number in held[:1]:
            signal.raise_signal(number)


# What is said of layers that make a step depend on how its rows are split over workers (R9). Pure.


NAMED = 3  # layers that are named; the others are counted


def describe_dependent_layers(dependent: Iterable[tuple[str, str]]) -> str | None:
    """The warning, or None if `dependent` (the name of each such layer, and why) is empty."""
    found = [f"{name} ({why})" for name, why in dependent]
    if not found:
        return None
    named = ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
    return (
        f"the trained weights depend on the number of workers through {named}: every row still trains exactly once and "
        "all workers hold the same weights."
    )


# In which precision a model of torch's is given its columns: one rule for training and for predictions, whose
# processes load no trainer. Pure looking at parameters.


def input_dtype(parameters: Iterable[Any], default: Any) -> Any:
    """That of the first parameter that is trained; a frozen one may be of fewer bits. default: where there is none."""
    floats = [parameter for parameter in parameters if parameter.is_floating_point()]
    trained = [parameter for parameter in floats if parameter.requires_grad]
    return next((parameter.dtype for parameter in trained or floats), default)


# What a model of torch's may return besides a tensor: one rule for training and for predictions, whose processes load
# no trainer. Pure.


def output_parts(output: Any) -> tuple[Any, ...]:
    """The outputs, in order: of a tuple, list or dict (as transformers' models return) each member."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else (output,)


# A state from one rank to others, as bytes, verified before anybody takes it over (R5). Main thread only.


Bytes = npt.NDArray[np.uint8]


def handed_over(
    group: Group, source: int, receivers: Sequence[int], mine: tuple[Bytes, Bytes] | None
) -> tuple[Bytes, Bytes] | None:
    """Both parts of what rank `source` has, on the receivers; None elsewhere. Collective over the whole group.

    Raises:
        CollectiveError: the group broke.
        StoreError: what arrived is not what was sent.
    """
    rest, staging = mine or (np.empty(0, np.uint8), np.empty(0, np.uint8))
    head = np.array([rest.nbytes, staging.nbytes, _crc(rest), _crc(staging)], np.int64)
    group.broadcast(head, source)
    if mine is None:
        rest, staging = np.empty(int(head[0]), np.uint8), np.empty(int(head[1]), np.uint8)
    group.broadcast(rest, source)
    group.broadcast(staging, source)
    if mine is not None or group.rank not in receivers:
        return None
    if (_crc(rest), _crc(staging)) != (int(head[2]), int(head[3])):
        raise StoreError("the state that arrived is not the one that was sent; it was not taken over.")
    return rest, staging


def _crc(data: Bytes) -> int:
    return zlib.crc32(data.data)
