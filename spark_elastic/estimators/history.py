"""How a fit went, as plain values that a fitted model keeps and saves: epochs, worlds, seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorldRecord:
    """A world and when it began, in seconds since training was launched."""

    seconds: float
    size: int
    reason: str


@dataclass(frozen=True)
class FitSummary:
    """epochs: one dict per epoch, with at least `epoch`, `loss` and `rows`; seconds: the whole of `fit`.

    digest: checksum of the final weights. data_rows: rows of the training table.
    """

    run_id: str = ""
    epochs: tuple[Mapping[str, Any], ...] = ()
    worlds: tuple[WorldRecord, ...] = ()
    seconds: float = 0.0
    data_rows: int = 0
    digest: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows_per_epoch(self) -> list[int]:
        """Rows trained in each epoch."""
        return [int(epoch["rows"]) for epoch in self.epochs]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FitSummary:
        fields = json.loads(text)
        worlds = tuple(WorldRecord(**world) for world in fields.pop("worlds"))
        return cls(epochs=tuple(fields.pop("epochs")), worlds=worlds, **fields)
