"""`RowDataset`: rows of a table as a map-style data set of torch, and their values as tensors.

Torch's worker processes open files of their own. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from spark_elastic.data.packing import Ragged
from spark_elastic.data.row_handle import RowAccess, RowHandle


class RowDataset(Dataset[dict[str, Any]]):
    """A row is a dict of tensors by column; bytes and strings stay what they are, dates and times are numpy's.

    A `DataLoader` with a batch sampler of its own order reads any row at once, through the row groups that the process
    keeps decoded. `ElasticDataLoader`, and trainers over it, take rows in an order that needs few of these at a time.
    """

    def __init__(self, rows: RowHandle) -> None:
        self.rows = rows
        self._access = RowAccess(rows.store, rows.manifest)

    def __len__(self) -> int:
        return self.rows.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The row of that number; from the end if it is below 0. Raises IndexError if there is none."""
        number = row + len(self) if row < 0 else row
        if not 0 <= number < len(self):
            raise IndexError(f"there is no row {row}: the data set has {len(self)} rows")
        return self.__getitems__([number])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return list(iter_items(self._access.take(rows)))


def to_tensors(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Column -> (n, *shape) tensor over the same memory, or `Ragged` of tensors; a list for bytes and strings, an array
    for dates."""
    return {name: _to_tensor(values) for name, values in columns.items()}


def iter_items(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each row as a dict, its numbers as tensors."""
    values = to_tensors(columns)
    for row in range(len(next(iter(columns.values())))):
        yield {name: column[row] for name, column in values.items()}


def _to_tensor(values: Any) -> Any:
    if isinstance(values, Ragged):
        return values.tensors()
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype == object:
        is_ragged = len(values) and isinstance(values[0], np.ndarray)
        return Ragged.of(values).tensors() if is_ragged else values.tolist()
    if values.dtype.kind == "M":
        return values
    if not values.flags.writeable:  # torch warns of memory that must not change
        values = values.copy()
    return torch.from_numpy(values)
