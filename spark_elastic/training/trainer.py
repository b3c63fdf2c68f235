"""What the training loop asks of a framework: a state, its steps and its callbacks."""

from __future__ import annotations

import signal
import threading
from _signal import signal as set_handler  # type: ignore[import-not-found]
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np

from elastic_collectives import Group
from spark_elastic.clock import Clock, SystemClock, read_thread_seconds
from spark_elastic.data.loader import StepRows
from spark_elastic.errors import ElasticError
from spark_elastic.gradients.step_summary import StepDecision, StepSummary, exchange_summaries
from spark_elastic.protocol.types import MembershipVersion, Position
from spark_elastic.runs.ledger import Ledger
from spark_elastic.runs.snapshot import Codec, Snapshot, SnapshotBuilder, broadcast_snapshot, build_snapshot
from spark_elastic.training.batch import LocalBatch, R, StepMetrics
from spark_elastic.training.progress import TrainingProgress
from spark_elastic.training.spec import FitConfig


class TrainingState(Protocol):
    """Everything that a newcomer receives and a checkpoint holds."""

    position: Position
    progress: TrainingProgress
    codec: Codec  # encodes what `capture` returns

    def capture(self, builder: SnapshotBuilder) -> Any:
        """Add all arrays to the builder, and return the rest as a tree of values that shares nothing with the state."""

    def load(self, snapshot: Snapshot) -> None:
        """Load a snapshot with its position."""

    def digest(self) -> str:
        """A checksum of all weights and optimizer values, equal on every replica (P4)."""


def sync_state(state: TrainingState, group: Group, source: int, receives: bool) -> Position:
    """Hand the state of rank `source` to the ranks that receive it; collective over the whole group (R5, staging).
    Raises CollectiveError, StoreError: the group broke, or the bytes did not arrive; the state is as it was."""
    mine = build_snapshot(state.position, state.capture) if group.rank == source else None
    arrived = broadcast_snapshot(group, source, mine, state.codec, receives)
    if arrived is not None:
        state.load(arrived)
    return state.position


class StepDisputed(ElasticError):
    """Ranks computed different bits from the same rows, so the step is not applied; raised on every rank alike."""

    def __init__(self, text: str, suspects: Sequence[int]) -> None:
        super().__init__(text)
        self.suspects = tuple(suspects)  # the ranks one of which, or all of which, are wrong


class StepCall(NamedTuple):
    """What the training loop gives with the rows of a step."""

    group: Group
    version: MembershipVersion  # the newest that this worker knows
    record_step: Callable[[StepDecision], Position]  # adds to the sums; returns the next position
    finalize_previous: Callable[[], None] = lambda: None  # before this step is applied
    # Returns the rows of the step after this one, None: they are not there yet. May be called while a device computes.
    get_next_rows: Callable[[], StepRows | None] = lambda: None


class WorkClock:
    """Measures how long this rank works for a step: all that it does between two exchanges and, of the exchange before
    them, the time in which its thread ran or waited for a processor, as a quota makes it. What it waits for other ranks
    does not count. Training thread only."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._began: float | None = None  # when the work under way began; None: it is not measured
        self._thread_began = self._exchange = 0.0  # of this thread in the exchange; when it began
        self._counts_exchanges = False

    def restart(self, *, counts_exchanges: bool) -> None:
        """Leave the step to come unmeasured: more than a step's work lies before it."""
        self._began, self._counts_exchanges = None, counts_exchanges

    def take(self) -> float:
        """Stop the clock: an exchange begins. Returns the seconds of work since the last one, 0.0: not measured."""
        began, self._began = self._began, None
        seconds = 0.0 if began is None else self._clock.now() - began + self._exchange
        if self._counts_exchanges:
            self._thread_began = read_thread_seconds()
        return seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """An exchange in the middle of the work."""
        began = self._clock.now()
        yield
        if self._began is not None:
            self._began += self._clock.now() - began

    def begin(self) -> None:
        """Start the clock: the exchange is over, and the work for the next step begins."""
        self._began = self._clock.now()
        if self._counts_exchanges:
            self._exchange = read_thread_seconds() - self._thread_began


class CallbackList(ABC):
    """Calls the user's callbacks at the right moments."""

    def on_fit_begin(self, group: Group) -> None:  # noqa: B027 - a framework may have nothing to do there
        """Called once, in the first world, before a state is taken over, which replaces what callbacks set here."""

    @abstractmethod
    def on_world_begin(self, group: Group) -> None: ...

    @abstractmethod
    def on_epoch_begin(self, epoch: int) -> None:
        """Called in each world that takes a step of the epoch; the callbacks' hook is called once in each epoch."""

    @abstractmethod
    def on_step_begin(self, epoch: int, step: int) -> None: ...

    def on_step_applied(self) -> None:  # noqa: B027
        """A step is being applied; called inside its apply section."""

    @abstractmethod
    def on_step_finalized(self, logs: Mapping[str, Any]) -> None:
        """A step is finalized (R1, finalized steps). logs: epoch, step, loss and rows of the step."""

    @abstractmethod
    def wants_stop(self) -> bool:
        """Whether a callback wants training to end after the step under way."""

    @abstractmethod
    def on_epoch_end(self, group: Group, logs: dict[str, Any]) -> str | None:
        """Why training is to end, or None. Raises CollectiveError: the group broke; the callbacks are as they were."""

    @abstractmethod
    def on_fit_end(self, history: list[dict[str, Any]]) -> None: ...


class ModelTrainer(ABC):
    """A model in training. Made by the user's process, prepared in a worker; main thread only. A step of training or
    validation either is applied, or leaves everything as it was and raises."""

    state: TrainingState
    callbacks: CallbackList
    _train_step: ModelStep[Any]

    @property
    def work(self) -> WorkClock:
        return self._train_step.work

    @property
    def bulk_seconds(self) -> float | None:
        """From the beginning of NCCL's communicator until it was in use; None: it is not, or not yet."""
        return None

    @abstractmethod
    def prepare(self, progress: TrainingProgress, ledger: Ledger) -> None:
        """Build the state, with `progress` in it. A spare does so long before it becomes a worker."""

    def move_to_device(self) -> None:  # noqa: B027 - Keras places variables when it makes them
        """This process is a worker: move the model to the device that it trains on. May be called again."""

    @abstractmethod
    def train_step(self, rows: StepRows, call: StepCall) -> StepDecision: ...

    @abstractmethod
    def validation_mode(self) -> AbstractContextManager[None]:
        """A context around the validation steps of one epoch."""

    @abstractmethod
    def validation_step(self, rows: StepRows, call: StepCall) -> StepDecision: ...

    @abstractmethod
    def epoch_metrics(self) -> dict[str, Any]:
        """Metrics and learning rate of the epoch that is over."""

    @abstractmethod
    def reset_metrics(self) -> None:
        """Begin the next epoch's metrics."""

    @abstractmethod
    def describe_world_dependence(self) -> str | None:
        """A sentence that names what makes the weights depend on the number of workers (R9, scope of P2), or None."""

    @abstractmethod
    def export_weights(self) -> bytes:
        """The final model's weights, in the form in which the store keeps them."""

    @abstractmethod
    def close(self) -> None: ...


class DeferredInterrupts:
    """The apply section of a step (R1, finalized steps): nothing interrupts it, and Ctrl-C waits until it ends."""

    def __enter__(self) -> None:
        self._received: list[int] = []
        # Signals interrupt the main thread only.
        self._is_main = threading.get_ident() == threading.main_thread().ident
        if self._is_main:
            self._former = set_handler(signal.SIGINT, self._defer)

    def __exit__(self, *error: object) -> None:
        if self._is_main:
            set_handler(signal.SIGINT, self._former)
            if self._received:
                signal.raise_signal(signal.SIGINT)

    def _defer(self, number: int, frame: object) -> None:
        self._received.append(number)


Summarize = Callable[..., StepSummary]


class ModelStep(ABC, Generic[R]):
    """Takes training steps on one state. Main thread only. A step is applied once `exchange_summaries` returns; it is
    finalized once any later collective of the group completes (R1, finalized steps)."""

    _state: TrainingState
    _metrics: StepMetrics
    _gather: Callable[[Any], Any] | None = None  # of `exchange_summaries`, for the step under way

    def __init__(self, config: FitConfig, ledger: Ledger) -> None:
        self._config, self._ledger, self.work = config, ledger, WorkClock()

    def run(self, batch: LocalBatch[R], call: StepCall, *, wants_stop: bool = False) -> StepDecision:
        """Take one step; after an error the state is as before it. wants_stop: a callback wants training to end.
        Raises CollectiveError: the exchange broke. Raises FloatingPointError: the loss is not finite, but must be."""
        group, position = call.group, self._state.position
        self._begin(group.rank)
        try:
            own: dict[str, Any] = {"rows": len(batch), "has_weight": batch.has_weight}
            summarize = partial(StepSummary, position, call.version, wants_stop=wants_stop, **own)
            summary = self._exchange_sums(group, batch, summarize)
            decision = exchange_summaries(group, summary, self._gather)
            self.work.begin()
            if self._config.loss.terminate_on_nan:
                decision.check_finite(position)
        except BaseException:
            self._restore()
            self._metrics.discard()
            raise
        with DeferredInterrupts():
            self._finalize(call.finalize_previous)
            self._apply(decision, batch.planned)
            self._metrics.commit()
            self._state.position = call.record_step(decision)
            self._ledger.record_applied(group.fence, position, group.size)
        return decision

    @property
    def key(self) -> tuple[int, ...]:
        """What random numbers of the step are drawn by, with the number of a rank or a virtual share."""
        position = self._state.position
        return self._config.data.seed, position.epoch, position.phase, position.step

    @abstractmethod
    def _begin(self, rank: int) -> None:
        """Keep what the step's forward passes write."""

    @abstractmethod
    def _restore(self) -> None:
        """Put that back (R3, aborted forward)."""

    @abstractmethod
    def _exchange_sums(self, group: Group, batch: LocalBatch[R], summarize: Summarize) -> StepSummary:
        """Compute gradients, and exchange all that the step needs but its summary, which `summarize` makes."""

    def _finalize(self, previous: Callable[[], None]) -> None:
        """Call the function, which shows the model to the user's callbacks."""
        previous()

    @abstractmethod
    def _apply(self, decision: StepDecision, planned: int) -> None:
        """The optimizer's step. planned: rows of the step."""


def take_validation_step(
    state: TrainingState,
    batch: LocalBatch[Any],
    metrics: StepMetrics,
    call: StepCall,
    compute: Callable[[], tuple[float, float]],
) -> StepDecision:
    """compute: returns the loss of this rank's rows and its denominator, and adds the rows to the metrics."""
    try:
        loss, denominator = compute()
        metrics.gather(call.group)
        summary = StepSummary(
            state.position,
            call.version,
            layout=0,
            loss=loss,
            denominator=denominator,
            rows=len(batch),
            present=np.zeros(0, np.bool_),
            has_weight=batch.has_weight,
        )
        decision = exchange_summaries(call.group, summary)
    except BaseException:
        metrics.discard()
        raise
    metrics.commit()
    state.position = call.record_step(decision)
    return decision


MOST_NAMED = 3  # layers that the warning names; it counts the others


def describe_dependent_layers(dependent: Iterable[tuple[str, str]]) -> str | None:
    """The warning about layers, given with why, that make a step depend on how its rows are split (R9, scope of P2)."""
    layers = [f"{name} ({why})" for name, why in dependent]
    if not layers:
        return None
    more = f" and {len(layers) - MOST_NAMED} more" if len(layers) > MOST_NAMED else ""
    return (
        f"the trained weights depend on the number of workers through {', '.join(layers[:MOST_NAMED])}{more}: every "
        "row still trains exactly once and all workers hold the same weights."
    )
