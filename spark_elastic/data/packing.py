"""Rows of different lengths, such as the tokens of documents: one array (`Ragged`), or sequences of one length.

The documents of a few neighbouring row groups, a window, are packed by their lengths alone, the longest first, each
into the sequence that it fills best. So a window is what a row group is elsewhere: a number of rows of one shape, which
`data.plan` gives to steps and ranks by seed and epoch. torch is imported where tensors are wanted. Values; any thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.checks import COUNT, make_choice
from spark_elastic.data.plan import Int64s
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
        """From a batch's ragged column, an object array of 1-D arrays, or from any sequence of 1-D arrays.

        max_length: longer rows lose what is behind it; `truncated` counts them. dtype: of the values; None: the rows'.
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
        return cls(found, _find_offsets(lengths), truncated)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        values, offsets = zip(*(part._arrays for part in parts), strict=True)
        lengths = np.concatenate([np.diff(each) for each in offsets])
        joined = cls(np.concatenate(values), _find_offsets(lengths), sum(part.truncated for part in parts))
        return joined.tensors() if parts[0]._is_torch else joined

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Any]:
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


def _find_offsets(lengths: Any) -> Int64s:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _to_tensor(array: Array) -> Any:
    import torch

    # In torch's memory, whose alignment is always the same: numpy's may differ from worker to worker, and sums with it.
    return torch.tensor(array)


IGNORED = -100  # the label that losses of torch and transformers leave out
# Sequences of a window, at least: the last of them is filled by chance. Fewer where they are long.
WINDOW_SEQUENCES, WINDOW_TOKENS, LEAST_SEQUENCES = 128, 1 << 20, 48
DOCUMENT_IDS, POSITION_IDS, LABELS = "document_ids", "position_ids", "labels"


@dataclass(frozen=True)
class Packing:
    """How documents become sequences of one length.

    A packed row has the columns `column` and those of `along`, `document_ids` (1, 2, ... in each sequence, 0 for
    padding), `position_ids` (0, 1, ... in each document) and `labels` (int64: a copy of `column` unless `along` has
    them; -100 for padding and, unless `predict_first`, for the first token of each document).
    """

    column: str = "input_ids"  # of arrays, the documents' tokens
    length: int = 2048  # tokens of a sequence
    overlong: str = "refuse"  # longer documents: "refuse", "split" into several, or "truncate"
    pad_id: int = 0  # the token that fills the end of a sequence
    # Columns whose rows are as long as those of `column`, such as labels -> the value that fills their end.
    along: Mapping[str, Any] = field(default_factory=dict)
    predict_first: bool = False  # whether the last token of a document is to predict the first of the next
    length_column: str | None = None  # column with the tokens of each document; None: they are counted

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", COUNT("length", self.length))
        make_choice("refuse", "split", "truncate")("overlong", self.overlong)
        for name in (DOCUMENT_IDS, POSITION_IDS):
            if name in self.sources:
                raise InvalidInput(f"Packing makes a column {name!r}: rename the one that it is to pack.")

    @property
    def sources(self) -> dict[str, Any]:
        """The columns that are packed -> what fills the end of a sequence."""
        return {self.column: self.pad_id, **self.along}


@dataclass(frozen=True)
class Window:
    """Pieces of documents in sequences, in the order of the sequences and in each as they come."""

    count: int  # sequences
    documents: Int64s  # (n,) the number in the window of each piece's document
    starts: Int64s  # the piece has the tokens `starts ... stops` of its document
    stops: Int64s
    sequences: Int64s  # (n,) the sequence that each piece is in

    @property
    def sizes(self) -> Int64s:
        return self.stops - self.starts

    def fill(self, rows: Ragged, width: int, value: Any) -> Array:
        """(count, width) the values of all pieces, with `value` behind those of each sequence."""
        starts, sizes = rows.offsets[self.documents] + self.starts, self.sizes
        before = np.cumsum(sizes) - sizes
        places = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
        return self._spread(rows.values[places], width, value)

    def number_documents(self, width: int) -> npt.NDArray[np.int32]:
        """(count, width) 1, 2, ... for the pieces of each sequence, 0 behind them."""
        first = np.searchsorted(self.sequences, self.sequences)
        numbers = (np.arange(len(self.sequences)) - first + 1).astype(np.int32)
        return self._spread(np.repeat(numbers, self.sizes), width, 0)

    def _spread(self, values: Array, width: int, value: Any) -> Array:
        used = np.bincount(self.sequences, self.sizes, self.count)
        found = np.full((self.count, width), value, values.dtype)
        found[np.arange(width) < used[:, None]] = values
        return found


def pack_window(lengths: Int64s, packing: Packing) -> Window:
    """Pack the documents of a window; one that is empty is nowhere. See `check_lengths` for longer ones."""
    length, longest = packing.length, max(int(lengths.max(initial=0)), 1)
    parts = -(-lengths // length) if packing.overlong == "split" else np.minimum(lengths, 1)
    documents = np.repeat(np.arange(len(lengths)), parts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(parts) - parts, parts)) * length
    stops = np.minimum(starts + length, lengths[documents])
    order = np.argsort((longest - (stops - starts)), kind="stable")
    sequences, count = _fit_best((stops - starts)[order].tolist(), length)
    order = order[np.argsort(sequences, kind="stable")]
    return Window(count, documents[order], starts[order], stops[order], np.sort(sequences))


def _fit_best(sizes: Sequence[int], length: int) -> tuple[Int64s, int]:
    """For each size the sequence that has the least room for it, or a new one, and the number of sequences."""
    open_sequences: defaultdict[int, list[int]] = defaultdict(list)  # by the room that is left in them
    rooms = 0  # bit r: there is a sequence with room r
    found = np.empty(len(sizes), np.int64)
    count = 0
    for piece, size in enumerate(sizes):
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            sequence = open_sequences[room].pop()
            if not open_sequences[room]:
                rooms ^= 1 << room
        else:
            sequence, room, count = count, length, count + 1
        found[piece] = sequence
        left = room - size
        if left:
            open_sequences[left].append(sequence)
            rooms |= 1 << left
    return found, count


def check_lengths(lengths: Int64s, packing: Packing) -> int:
    """The number of documents that are split or truncated. Raises InvalidInput where neither is allowed."""
    if not lengths.any():
        raise InvalidInput(f"The documents in column {packing.column!r} have no tokens: nothing to pack.")
    overlong = int(np.count_nonzero(lengths > packing.length))
    if overlong and packing.overlong == "refuse":
        raise InvalidInput(
            f"The column {packing.column!r} has {overlong} documents of more than {packing.length} tokens, the longest "
            f"of {lengths.max()}: raise length, or say overlong='split' or overlong='truncate'."
        )
    return overlong


def cut_windows(tokens: Int64s, length: int) -> tuple[int, ...]:
    """Row groups to windows: window w has the row groups `cuts[w] ... cuts[w + 1]`. tokens: of each row group."""
    wanted = length * max(LEAST_SEQUENCES, min(WINDOW_SEQUENCES, WINDOW_TOKENS // length))
    cuts, begun = [0], 0
    for group, count in enumerate(tokens.tolist()):
        begun += count
        if begun >= wanted:
            cuts.append(group + 1)
            begun = 0
    if cuts[-1] != len(tokens):
        if len(cuts) > 1 and 2 * begun < wanted:
            cuts.pop()  # the rest goes to the window before
        cuts.append(len(tokens))
    return tuple(cuts)


def pack_groups(lengths: Sequence[Int64s], packing: Packing) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The windows, as `cut_windows` has them, and the sequences of each. lengths: the documents', by row group."""
    cuts = cut_windows(np.array([each.sum() for each in lengths], np.int64), packing.length)
    return cuts, tuple(
        pack_window(np.concatenate(lengths[first:past]), packing).count for first, past in pairwise(cuts)
    )


def find_positions(document_ids: Array) -> npt.NDArray[np.int32]:
    """Of each token its place in its document; padding counts as one."""
    places = np.arange(document_ids.shape[-1], dtype=np.int32)
    begins = np.where(_find_begins(document_ids), places, np.int32(0))
    return places - np.maximum.accumulate(begins, axis=-1)


def make_labels(tokens: Array, document_ids: Array, predict_first: bool = False) -> Int64s:
    """The tokens, or labels, with -100 for padding and, unless `predict_first`, for the first of each document."""
    ignored = document_ids == 0
    if not predict_first:
        ignored |= _find_begins(document_ids)
    return np.where(ignored, IGNORED, tokens.astype(np.int64, copy=False))


def cumulate_lengths(document_ids: Array) -> npt.NDArray[np.int32]:
    """`cu_seqlens` of kernels that attend inside of documents (FlashAttention's varlen functions), of a batch (rows,
    length) as one row of tokens: 0, the end of each document, ... The padding of a sequence is one more document."""
    begins = np.flatnonzero(_find_begins(np.asarray(document_ids)))
    return np.append(begins, np.asarray(document_ids).size).astype(np.int32)


def _find_begins(document_ids: Array) -> npt.NDArray[np.bool_]:
    begins = np.ones(document_ids.shape, np.bool_)
    begins[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    return begins
