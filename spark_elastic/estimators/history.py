"""How a fit went, as plain values that a fitted model keeps and saves: epochs, worlds, seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spark_elastic.observe.report import JobReport


@dataclass(frozen=True)
class WorldRecord:
    """A world and when it began, in seconds since training was launched."""

    seconds: float
    size: int
    reason: str


@dataclass(frozen=True)
class FitSummary:
    """epochs: one dict per epoch, with at least `epoch`, `loss` and `rows`; seconds: the whole of `fit`.

    digest: checksum of the final weights. data_rows: rows of the training table. report: where the time went, what
    losses cost, and the rows of each epoch; of the last `fit` of the run alone.
    """

    run_id: str = ""
    epochs: tuple[Mapping[str, Any], ...] = ()
    worlds: tuple[WorldRecord, ...] = ()
    seconds: float = 0.0
    data_rows: int = 0
    digest: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    report: JobReport = field(default_factory=JobReport)

    @property
    def rows_per_epoch(self) -> list[int]:
        """Rows trained in each epoch."""
        return [int(epoch["rows"]) for epoch in self.epochs]

    def to_json(self) -> str:
        fields = asdict(replace(self, report=JobReport()))
        return json.dumps({**fields, "report": json.loads(self.report.to_json())})

    @classmethod
    def from_json(cls, text: str) -> FitSummary:
        fields = json.loads(text)
        worlds = tuple(WorldRecord(**world) for world in fields.pop("worlds"))
        # A model that was saved by an earlier version has none.
        report = JobReport.from_json(json.dumps(fields.pop("report"))) if "report" in fields else JobReport()
        return cls(epochs=tuple(fields.pop("epochs")), worlds=worlds, report=report, **fields)
