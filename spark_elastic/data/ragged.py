"""Rows of different lengths, such as the tokens of documents: the values of a batch, and where each row ends.

numpy alone; torch is imported where tensors are asked for. Values; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import InvalidInput

Array = npt.NDArray[Any]


def split_rows(values: Array, offsets: Array) -> Array:
    """An object array of rows, which are views: of row i the values `offsets[i] ... offsets[i + 1]`."""
    rows = np.empty(len(offsets) - 1, object)
    for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
        rows[row] = values[begin:end]  # numpy would take a list of rows for one array if all are equally long
    return rows


def format_remedy(dimensions: int) -> str:
    """What to do with arrays of different lengths where one length is needed, for errors."""
    if dimensions > 1:
        return "pad or cut them to one length"
    return (
        "pad or cut them to one length, pack them (spark_elastic.Packing), or give a transformation_fn that takes them "
        "as they are"
    )


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, as arrays of numpy or, after `tensors()`, of torch."""

    values: Any  # (n,) the values of all rows, one row behind the other
    offsets: Any  # (rows + 1,) int64; row i has the values `offsets[i] ... offsets[i + 1]`
    truncated: int = 0  # rows that `max_length` has cut

    @classmethod
    def of(cls, rows: Any, max_length: int | None = None, dtype: str | None = None) -> Ragged:
        """From a batch's ragged column, which is an object array of 1-D arrays, or from any sequence of 1-D arrays.

        max_length: longer rows lose what is behind it; `truncated` counts them. dtype: of the values; None: as in the
        rows.
        """
        parts = [np.asarray(row) for row in rows]
        if any(part.ndim != 1 for part in parts):
            raise InvalidInput("Ragged takes rows that are 1-D arrays: flatten each row.")
        cut = parts if max_length is None else [part[:max_length] for part in parts]
        lengths = [len(part) for part in cut]
        truncated = sum(len(part) > kept for part, kept in zip(parts, lengths, strict=True))
        # An empty row, of which numpy makes float64, does not decide on the dtype.
        found = np.concatenate([part for part in cut if len(part)] or cut or [np.zeros(0)])
        found = found if dtype is None else found.astype(dtype, copy=False)
        return cls(
            found, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64), truncated
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts (one at least)."""
        values, offsets = zip(*(part._arrays for part in parts), strict=True)
        lengths = np.concatenate([np.diff(each) for each in offsets])
        found = cls(
            np.concatenate(values),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            sum(part.truncated for part in parts),
        )
        return found.tensors() if parts[0]._is_torch else found

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        """Each row, as a view."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, rows: Any) -> Any:
        """A row, for a number; else the rows of a slice, a mask or an array of numbers, as a `Ragged`."""
        _, offsets = self._arrays
        if isinstance(rows, int | np.integer):
            row = range(len(self))[rows]
            return self.values[int(offsets[row]) : int(offsets[row + 1])]
        if isinstance(rows, slice) and rows.step in (None, 1):
            first, past, _ = rows.indices(len(self))
            past = max(first, past)
            part = self.values[int(offsets[first]) : int(offsets[past])]
            return replace(self, values=part, offsets=self.offsets[first : past + 1] - self.offsets[first])
        chosen = np.arange(len(self))[rows]
        return self._like([self[row] for row in chosen.tolist()])

    def truncate(self, max_length: int) -> Ragged:
        """Rows of at most that many values; `truncated` counts those that were longer."""
        return self._like(list(self), max_length)

    def _like(self, rows: Sequence[Any], max_length: int | None = None) -> Ragged:
        """Rows of the same dtype and the same kind of arrays."""
        found = Ragged.of(rows, max_length, str(self._arrays[0].dtype))
        return found.tensors() if self._is_torch else found

    @property
    def lengths(self) -> Any:
        """(rows,) how many values each row has."""
        return self.offsets[1:] - self.offsets[:-1]

    def pad(self, value: Any, to: int | None = None) -> Any:
        """(rows, `to`) an array or tensor, in which `value` follows the values of each row.

        to: the length of all rows; None: that of the longest. Raises InvalidInput if a row is longer.
        """
        values, offsets = self._arrays
        lengths = np.diff(offsets)
        longest = int(lengths.max(initial=0))
        width = longest if to is None else to
        if longest > width:
            raise InvalidInput(
                f"A row has {longest} values, and pad was asked for {width}: raise `to`, or cut rows with max_length."
            )
        padded = np.full((len(self), width), value, values.dtype)
        padded[np.arange(width) < lengths[:, None]] = values[offsets[0] : offsets[-1]]
        return _to_tensor(padded) if self._is_torch else padded

    def nested(self) -> Any:
        """torch's nested tensor of the rows, with the layout `torch.jagged`."""
        import torch

        own = self.tensors()
        return torch.nested.nested_tensor_from_jagged(own.values, own.offsets)

    def tensors(self) -> Ragged:
        """The same with tensors of torch, of which `pad` then makes one as well; strings and dates, for which torch has
        no type, stay arrays."""
        if self._is_torch or self.values.dtype.kind not in "biuf":
            return self
        return replace(self, values=_to_tensor(self.values), offsets=_to_tensor(self.offsets))

    @property
    def _is_torch(self) -> bool:
        return not isinstance(self.values, np.ndarray)

    @property
    def _arrays(self) -> tuple[Array, Array]:
        return np.asarray(self.values), np.asarray(self.offsets)


def _to_tensor(array: Array) -> Any:
    import torch

    # In torch's memory, whose alignment is always the same: numpy's may differ from worker to worker, and sums with it.
    return torch.tensor(array)
