"""The report of a job: where its time went, what losses cost, and which rows were trained. Pure values.

Made by `Chronicle.report`; a fitted model keeps it as JSON. Knows neither the driver nor a framework.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic.observe.changes import UNPLANNED, Kind, WorldChange
from spark_elastic.observe.curve import CurvePoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = ("start", "training", "recovery", "planned", "closing")


@dataclass(frozen=True)
class EpochRows:
    """How many rows of one epoch entered an applied step (`seen`), and how many fewer (`missing`) or more (`doubled`)
    than planned that is. These are counts; `ledger=True` records the ids of the rows."""

    epoch: int
    seen: int
    missing: int
    doubled: int


@dataclass(frozen=True)
class JobReport:
    """seconds: the whole job. phases: seconds of each of PHASES: until the first world was complete; while a world
    trained; while nobody trained because of losses, or because of planned changes; after the first worker was done.

    checkpoint_seconds: how long checkpoints, including the copy of the state, held up training. reserved_hours,
    useful_hours: of all slots, and of all workers while their world trained. curve: thinned.
    """

    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[WorldChange, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    checkpoints: int = 0
    checkpoint_seconds: float = 0.0
    reserved_hours: float = 0.0
    useful_hours: float = 0.0
    epochs: tuple[EpochRows, ...] = ()

    @property
    def goodput(self) -> float:
        """The part of the job's time, from launch to end, when a whole world trained, less what checkpoints took."""
        useful = self.phases.get("training", 0.0) - self.checkpoint_seconds
        return max(0.0, useful) / self.seconds if self.seconds > 0 else 0.0

    @property
    def recoveries(self) -> tuple[WorldChange, ...]:
        """Worlds that followed a loss."""
        return tuple(change for change in self.changes if change.kind in UNPLANNED)

    @property
    def steps_lost(self) -> int:
        return sum(change.steps_lost for change in self.changes)

    def recovery_seconds(self, percent: float) -> float | None:
        """The percentile (nearest rank) of the recoveries' durations; None if there was none."""
        known = sorted(change.seconds for change in self.recoveries if change.seconds is not None)
        return known[max(0, math.ceil(percent / 100 * len(known)) - 1)] if known else None

    def with_rows(self, history: Iterable[Mapping[str, Any]], data_rows: int) -> JobReport:
        """With the rows of each epoch: `history` has `epoch` and `rows`, counted by the state of the final weights, and
        `planned`, for the steps taken; without it `data_rows` were planned."""
        epochs = tuple(
            _epoch(int(entry["epoch"]), int(entry["rows"]), int(entry.get("planned", data_rows)))
            for entry in history
        )
        return dataclasses.replace(self, epochs=epochs)

    def plot(self) -> Figure:
        """Loss, throughput and world size over time. Needs matplotlib.

        Raises:
            InvalidInput: matplotlib is not installed.
        """
        from spark_elastic.observe.plots import figure

        return figure(self)

    def to_json(self) -> str:
        values = dataclasses.asdict(self)
        for change in values["changes"]:
            change["kind"] = change["kind"].value
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> JobReport:
        values = json.loads(text)
        changes = [
            WorldChange(**{**change, "kind": Kind(change["kind"])}) for change in values.pop("changes")
        ]
        curve = tuple(CurvePoint(**point) for point in values.pop("curve"))
        epochs = tuple(EpochRows(**epoch) for epoch in values.pop("epochs"))
        return cls(changes=tuple(changes), curve=curve, epochs=epochs, **values)

    def __str__(self) -> str:
        """A few lines for people."""
        shares = ", ".join(f"{name} {self.phases.get(name, 0.0):.1f} s" for name in PHASES)
        lines = [f"goodput {self.goodput:.1%} of {self.seconds:.1f} s: {shares}"]
        if self.recoveries:
            p50, p99 = self.recovery_seconds(50), self.recovery_seconds(99)
            took = "" if p50 is None or p99 is None else f", p50 {p50:.2f} s, p99 {p99:.2f} s"
            lines.append(f"recoveries: {len(self.recoveries)}{took}; steps lost: {self.steps_lost}")
        else:
            lines.append("no losses")
        lines.append(
            f"checkpoints: {self.checkpoints}, which held up training for {self.checkpoint_seconds:.2f} s"
        )
        lines.append(f"worker-hours: {self.reserved_hours:.3f} reserved, {self.useful_hours:.3f} useful")
        lines += [
            f"epoch {rows.epoch + 1}: {rows.seen} rows, {rows.missing} missing, {rows.doubled} doubled"
            for rows in self.epochs
        ]
        return "\n".join(lines)


def _epoch(epoch: int, seen: int, due: int) -> EpochRows:
    return EpochRows(epoch, seen, max(0, due - seen), max(0, seen - due))
