"""How far a training has come, apart from its position: sums, history, why it stops; and the states of callbacks.

Part of the state: newcomers and checkpoints take it over as plain values. Pure.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.step_summary import StepDecision

OWN_NUMBERS = frozenset(  # of a history entry
    {"epoch", "loss", "rows", "planned", "steps", "seconds", "worlds", "learning_rate", "skipped_steps"}
)


@dataclass
class StepSums:
    """Sums over the steps of an epoch, or of its validation."""

    loss: float = 0.0  # sum of the losses of all rows
    divisor: float = 0.0  # of that sum (R8, weighting). 0: the loss is summed. NaN: there is no loss
    rows: int = 0  # rows of all ranks
    steps: int = 0  # number of steps
    seconds: float = 0.0  # seconds that the steps took on this worker
    world_sizes: list[int] = field(default_factory=list)  # sizes of the worlds that took the steps, each once
    has_weight: bool = False  # a row had a sample weight other than 0, or rows have none

    def add(self, decision: StepDecision, world_size: int, seconds: float) -> None:
        self.loss += decision.loss
        self.divisor += decision.denominator
        self.rows += decision.rows
        self.has_weight = self.has_weight or decision.has_weight
        self.steps += 1
        self.seconds += seconds
        if world_size not in self.world_sizes:
            self.world_sizes.append(world_size)

    def mean_loss(self) -> float:
        """The mean over rows, or over steps where the loss has no divisor. NaN: no row counted."""
        if not self.has_weight:
            return math.nan
        return self.loss / (self.divisor or self.steps)

    def correct_losses(self, metrics: Mapping[str, Any], losses: Sequence[str]) -> dict[str, Any]:
        """The metrics of the epoch; those among them that are losses of single outputs are NaN if no row counted."""
        wrong = () if self.has_weight else losses
        return {name: math.nan if name in wrong else value for name, value in metrics.items()}

    def history_entry(self, epoch: int, planned: int) -> dict[str, Any]:
        """The epoch as an entry of the history. planned: rows that these steps were to have."""
        return {
            "epoch": epoch,
            "loss": self.mean_loss(),
            "rows": self.rows,
            "planned": planned,
            "steps": self.steps,
            "seconds": self.seconds,
            "worlds": self.world_sizes,
        }


@dataclass
class TrainingProgress:
    """What a training remembers between its steps, besides weights and position."""

    history: list[dict[str, Any]] = field(default_factory=list)  # of each closed epoch; plain JSON
    epoch: StepSums = field(default_factory=StepSums)  # sums over the steps of the current epoch
    validation: StepSums = field(default_factory=StepSums)  # sums over the steps of its validation
    pending_logs: dict[str, Any] | None = None  # of the newest step until it is finalized
    stop_reason: str | None = None  # why the training ends with this epoch; None: it continues
    has_warned: bool = False  # whether it was warned of dependence on the world (R9, scope of P2)
    metric_sums: dict[str, tuple[float, float]] = field(default_factory=dict)  # Keras: as `StepMetrics.sums`
    # Keras: metrics of the epoch's training, kept while its validation uses the accumulators.
    train_metrics: dict[str, Any] = field(default_factory=dict)

    def begin_epoch(self) -> None:
        self.epoch, self.validation = StepSums(), StepSums()

    def to_values(self) -> dict[str, Any]:
        own = dataclasses.asdict(dataclasses.replace(self, history=[]))
        return {**own, "history": list(self.history)}  # whose entries stay as they are, and grow in number

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TrainingProgress:
        epoch, validation = StepSums(**values["epoch"]), StepSums(**values["validation"])
        return cls(**{**values, "epoch": epoch, "validation": validation})


def check_metric_names(names: Iterable[str]) -> None:
    """Raises InvalidInput: a metric would replace one of the fit's own numbers in the history."""
    wrong = OWN_NUMBERS.intersection(name.removeprefix("val_") for name in names)
    if wrong:
        raise InvalidInput(
            f"a metric is named {min(wrong)!r}, as one of the fit's own numbers in the history: give it another name."
        )


def select_figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """What of a history entry the next epoch's progress shows: losses of validation, metrics, learning rate."""
    return {name: value for name, value in entry.items() if isinstance(value, float) and name != "seconds"}


def to_json_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A history entry as plain JSON values. Raises InvalidInput: a callback added something that it cannot keep."""

    def to_list(value: Any) -> Any:
        if not hasattr(value, "tolist"):
            raise InvalidInput(
                "the history keeps numbers, strings, and lists of them: a callback added a "
                f"{type(value).__name__} to logs."
            )
        return value.tolist()

    values: dict[str, Any] = json.loads(json.dumps(entry, default=to_list))
    return values


# ---- callbacks of any framework


def name_classes(callbacks: Sequence[Any]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


def pair_states(callbacks: Sequence[Any], classes: Sequence[str], states: Sequence[Any]) -> list[Any]:
    """Each callback with the state of the one that it continues: the first of its class continues the first, and so on.
    A new callback keeps what it has, and the state of one that is gone is dropped."""
    left: dict[str, list[Any]] = {}
    for name, state in zip(classes, states, strict=True):
        left.setdefault(name, []).append(state)
    named = zip(callbacks, name_classes(callbacks), strict=True)
    return [(callback, left[name].pop(0)) for callback, name in named if left.get(name)]


def check_watched_names(
    watched: Iterable[str], known: Sequence[str], validates: bool, may_exist: Callable[[str], bool]
) -> None:
    """Raises InvalidInput: a callback watches a number that no epoch will have.
    known: losses and metrics. may_exist: whether there may be others, by name without `val_`."""
    for name in watched:
        plain = name.removeprefix("val_")
        if name not in known and plain not in known and not may_exist(plain):
            names = [*known, *(f"val_{each}" for each in known if validates)]
            needs = "" if validates or plain == name else " (those with val_ need a validation)"
            raise InvalidInput(
                f"a callback watches {name!r}, which no epoch will have: set its monitor to one of {', '.join(names)}"
                f"{needs}."
            )
        if name.startswith("val_") and name not in known and not validates:
            raise InvalidInput(
                f"a callback watches {name!r}, but nothing is validated: set validation (validation_paths of "
                "fit_on_parquet, validation_table of fit_on_table), or the callback's monitor='loss'."
            )
