"""A rank's rows of one step: as arrays for a model, as rows for metrics, and as columns for a loss of all rows.

Knows no framework: arrays and tensors only need to be cut along their rows. Training thread only.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group
from spark_elastic.data.plan import Division
from spark_elastic.errors import InvalidInput


class Cuttable(Protocol):
    """An array or a tensor, cut along its rows."""

    def __getitem__(self: R, part: slice, /) -> R: ...


R = TypeVar("R", bound=Cuttable)


@dataclass(frozen=True)
class LocalBatch(Generic[R]):
    """This rank's n rows of a step."""

    planned: int  # rows of the step over all ranks
    row_ids: npt.NDArray[np.int64]  # (n,) The global number of each row, for the ledger
    features: tuple[R, ...]  # (n, ...) each
    labels: tuple[R, ...]  # (n, ...) each
    weights: R | None  # (n,) Sample weights, if there are any
    shares: tuple[LocalBatch[R], ...] = ()  # in bitwise mode this rank's; the arrays above are then empty
    first_share: int = 0  # the number, among the step's virtual shares, of the first of `shares`
    division: Division | None = None  # of the step's virtual shares over all ranks; None: there are none
    # Labels and weights in memory of the host, where the arrays above are on another device.
    on_host: tuple[tuple[R, ...], R | None] | None = None

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def has_weight(self) -> bool:
        """Whether a row's sample weight is not 0; always where there are no weights."""
        if self.shares:
            return any(share.has_weight for share in self.shares)
        weights: Any = self.weights if self.on_host is None else self.on_host[1]
        return weights is None or bool(np.any(np.asarray(weights)))

    def micro_batches(self, rows: int) -> Iterator[LocalBatch[R]]:
        """Parts of at most `rows` rows, of sizes as equal as possible: BatchNorm cannot train on a single row."""
        parts = -(-len(self) // rows)
        if parts == 1:
            yield self
            return
        for number in range(parts):
            yield self.cut(slice(len(self) * number // parts, len(self) * (number + 1) // parts))

    def cut(self, part: slice) -> LocalBatch[R]:
        on_host = self.on_host
        return LocalBatch(
            self.planned,
            self.row_ids[part],
            tuple(each[part] for each in self.features),
            *_cut(self.labels, self.weights, part),
            on_host=None if on_host is None else _cut(*on_host, part),
        )


def _cut(labels: tuple[R, ...], weights: R | None, part: slice) -> tuple[tuple[R, ...], R | None]:
    return tuple(each[part] for each in labels), None if weights is None else weights[part]


# ---- rows for metrics

Arrays = list[npt.NDArray[Any]]
Logged = Mapping[str, tuple[float, float]]  # by name: a sum over rows, and their number or weight


class StepMetrics(ABC):
    """Metrics of one step after another: exact, and equal on all ranks, since each receives all rows of a step."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}  # as `Logged`, of losses, functions and logged numbers
        self._drop()

    def add_rows(self, logged: Logged, columns: Arrays | None) -> None:
        """Add some rows of this rank. columns: (rows, ...) each; None if only `logged` is exchanged."""
        self._logged.append(logged)
        if columns is not None:
            self._columns.append(columns)

    def _drop(self) -> None:
        self._logged: list[Logged] = []
        self._columns: list[Arrays] = []
        self._gathered: list[tuple[list[Logged], Arrays]] = []  # by rank

    def gather(self, group: Group) -> None:
        """Exchange the step's rows. Collective: ranks without rows call it, too."""
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        blob = pack_arrays(self._logged, columns)
        self._drop()  # first: the exchange may break
        self._gathered = [unpack_arrays(each) for each in group.allgather_bytes(blob)]

    def discard(self) -> None:
        self._drop()

    def commit(self) -> None:
        if not (self._gathered or self._logged or self._columns):
            return
        gathered = self._gathered
        self._drop()
        for logged in (part for parts, _ in gathered for part in parts):
            for name, (total, divisor) in logged.items():
                self._count(name, total, divisor)
        ranks = [columns for _, columns in gathered if columns]
        if ranks:
            self._count_rows([np.concatenate(column) for column in zip(*ranks, strict=True)])

    @abstractmethod
    def _count_rows(self, columns: Arrays) -> None:
        """Count the columns of a whole step: outputs, then labels, then weights."""

    def _count(self, name: str, total: float, divisor: float) -> None:
        so_far, before = self.sums.get(name, (0.0, 0))
        self.sums[name] = (so_far + total, before + divisor)


def pack_arrays(head: Sequence[Any], arrays: Arrays) -> bytes:
    """Encode without pickle: one JSON line, followed by the numbers of the arrays."""
    line = json.dumps([head, [[array.dtype.str, array.shape] for array in arrays]])
    return b"".join([line.encode() + b"\n", *(array.tobytes() for array in arrays)])


def unpack_arrays(blob: bytes) -> tuple[list[Any], Arrays]:
    place = blob.index(b"\n") + 1
    (head, kinds), arrays = json.loads(blob[:place]), []
    for dtype, shape in kinds:
        array = np.frombuffer(blob, dtype, math.prod(shape), place).reshape(shape)
        arrays.append(array.copy())  # which may be written, and is aligned
        place += array.nbytes
    return head, arrays


# ---- columns of all rows of a step


class Chunk(NamedTuple):
    """Rows that a rank computed at once, for a loss of all rows of a step (`loss_scope="step"`)."""

    rows: int  # their number
    columns: Arrays  # by tensor of the output, by label, and the weights


class Column(NamedTuple):
    """One of them, of all rows of the step."""

    values: npt.NDArray[Any]
    by_row: bool  # whether it has an entry for each row; else it is one value, which all rows share


def gather_columns(
    group: Group, chunks: Sequence[Chunk], pause: AbstractContextManager[None] | None = None
) -> tuple[list[Column], int, bool]:
    """Exchange the chunks of all ranks, inside of `pause`. Collective: ranks without rows call it, too.
    Returns the columns, where this rank's rows begin among them, and whether it reports the loss: it has the first."""
    packed = pack_arrays([chunk.rows for chunk in chunks], [c for chunk in chunks for c in chunk.columns])
    with pause or nullcontext():
        ranks = [_split(*unpack_arrays(blob)) for blob in group.allgather_bytes(packed)]
    first = sum(chunk.rows for chunks in ranks[: group.rank] for chunk in chunks)
    columns = join_chunks([chunk for chunks in ranks for chunk in chunks])
    return columns, first, not first and any(chunk.rows for chunk in chunks)


def _split(rows: list[int], columns: Arrays) -> list[Chunk]:
    count = len(columns) // max(len(rows), 1)
    return [Chunk(own, columns[number * count :][:count]) for number, own in enumerate(rows)]


def join_chunks(chunks: Sequence[Chunk]) -> list[Column]:
    """The columns of all these rows. Raises InvalidInput: they do not make one output of all rows."""
    found = []
    for arrays in zip(*(chunk.columns for chunk in chunks), strict=True):
        by_row = all(a.ndim and len(a) == chunk.rows for a, chunk in zip(arrays, chunks, strict=True))
        if by_row and all(each.shape[1:] == arrays[0].shape[1:] for each in arrays):
            found.append(Column(np.concatenate(arrays), True))
        elif not by_row and all(_are_equal(each, arrays[0]) for each in arrays):
            found.append(Column(arrays[0], False))
        else:
            pairs = zip(arrays, chunks, strict=True)
            shapes = sorted({f"{each.shape} for {chunk.rows} rows" for each, chunk in pairs})
            raise InvalidInput(
                "loss_scope='step' joins what the model returns for the rows of a step, and one of its tensors has "
                f"shape {' and '.join(shapes[:2])}: return one entry for each row, of one shape, or a value that does "
                "not depend on the rows."
            )
    return found


def _are_equal(one: Any, other: Any) -> bool:
    """Up to rounding, by which machines may differ."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-5, atol=0.0, equal_nan=True))
