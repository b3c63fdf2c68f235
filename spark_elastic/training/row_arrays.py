"""What a rank tells the others of its rows of a step, for metrics: numbers by name, and arrays; no pickle.

Every rank is given the whole step's rows, in rank order, so that metrics are exact and equal everywhere. Main thread
only.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group

Arrays = list[npt.NDArray[Any]]


class StepPart:
    """This rank's rows of the step in flight; once they are gathered, those of all ranks."""

    def __init__(self) -> None:
        self.drop()

    def add(self, rows: int, logged: Mapping[str, float], columns: Arrays | None) -> None:
        """Some rows more. logged: sums over them, by name. columns: None where the numbers are all that is told."""
        self._rows += rows
        for name, total in logged.items():
            self._logged[name] = self._logged.get(name, 0.0) + total
        if columns is not None:
            self._columns.append(columns)

    def drop(self) -> None:
        """Forget the rows of a step that was given up."""
        self._rows = 0
        self._logged: dict[str, float] = {}
        self._columns: list[Arrays] = []
        self._gathered: list[tuple[dict[str, float], int, Arrays]] = []

    def gather(self, group: Group) -> None:
        """Exchange the step's rows; collective, also on a rank without rows."""
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        blob = packed(self._logged, self._rows, columns)
        self.drop()  # first: the exchange may break
        self._gathered = [unpacked(each) for each in group.allgather_bytes(blob)]

    def taken(self) -> tuple[list[tuple[dict[str, float], int]], Arrays]:
        """What was gathered: (numbers, rows) of each rank, and the columns of the whole step, if any. Drops it."""
        gathered = self._gathered
        self.drop()
        parts = [columns for _, _, columns in gathered if columns]
        whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return [(logged, rows) for logged, rows, _ in gathered], whole


def packed(logged: Mapping[str, float], rows: int, columns: Arrays) -> bytes:
    """One JSON line, then arrays as numpy writes them."""
    file = io.BytesIO()
    file.write(json.dumps([dict(logged), rows, len(columns)]).encode() + b"\n")
    for column in columns:
        np.save(file, column, allow_pickle=False)
    return file.getvalue()


def unpacked(blob: bytes) -> tuple[dict[str, float], int, Arrays]:
    file = io.BytesIO(blob)
    logged, rows, columns = json.loads(file.readline())
    return logged, rows, [np.load(file, allow_pickle=False) for _ in range(columns)]
