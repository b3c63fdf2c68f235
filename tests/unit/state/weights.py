"""A value of numpy numbers as part of a state."""

from __future__ import annotations

from typing import Any

import numpy as np

from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.runs.handlers import SnapshotHandler
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder


class Weights:
    def __init__(self, numbers: int = 8, fill: float = 0.0) -> None:
        self.numbers = np.full(numbers, fill)
        self.changes = 0

    def add(self, change: float) -> None:
        self.numbers += change
        self.changes += 1


class WeightsHandler(SnapshotHandler):
    def capture(self, builder: SnapshotBuilder) -> Any:
        return builder.add(self.value.numbers.view(np.uint8), lambda: self.value.changes)

    def load(self, values: Any, memory: Bytes) -> None:
        self.value.numbers[:] = values.of(memory).view(np.float64)
        self.value.changes += 1


class WeightsState(ObjectState):
    registry = ((Weights, WeightsHandler),)
