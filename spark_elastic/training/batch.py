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
    # In bitwise mode the rows of each virtual share of this rank, in order; the arrays above are then empty.
    shares: tuple[LocalBatch[R], ...] = ()
    first_share: int = 0  # the number, among the step's virtual shares, of the first of `shares`
    # How all ranks divide the step's virtual shares; None: there are none, or this is one of them.
    division: Division | None = None
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
        """Some of these rows, of the same step."""
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
# By part of a batch and name: a sum over its rows, and what it is divided by, that is their number or their weight.
Logged = list[dict[str, tuple[float, float]]]


class MetricRows:
    """Outputs and labels of this rank's rows of the step in flight; after `gather`, those of all ranks in rank order.

    Every rank receives the whole step's rows, so metrics are exact and equal on all ranks. They travel without pickle.
    """

    def __init__(self) -> None:
        self.discard()

    def add(self, logged: Mapping[str, tuple[float, float]], columns: Arrays | None) -> None:
        """Add rows. logged: as an entry of `Logged`. columns: (rows, ...) each; None if only `logged` is exchanged."""
        self._logged.append(dict(logged))
        if columns is not None:
            self._columns.append(columns)

    def discard(self) -> None:
        """Drop the rows of a step that was aborted."""
        self._logged: Logged = []
        self._columns: list[Arrays] = []
        self._gathered: list[tuple[Logged, Arrays]] = []

    def gather(self, group: Group) -> None:
        """Exchange the step's rows. Collective: ranks without rows call it, too."""
        columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
        blob = pack_metric_rows(self._logged, columns)
        self.discard()  # first: the exchange may break
        self._gathered = [unpack_metric_rows(each) for each in group.allgather_bytes(blob)]

    def pop_gathered(self) -> tuple[Logged, Arrays]:
        """Return and drop what was gathered: numbers of each part, and the columns of the whole step, if any."""
        gathered = self._gathered
        self.discard()
        parts = [columns for _, columns in gathered if columns]
        whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return [each for logged, _ in gathered for each in logged], whole


class StepMetrics(ABC):
    """Metrics of the rows of one step after another. What a step gathered counts once `commit` is called."""

    def __init__(self) -> None:
        # By name, of losses, functions and logged numbers: the sum over rows, and their number or weight.
        self.sums: dict[str, tuple[float, float]] = {}
        self._part = MetricRows()

    def gather(self, group: Group) -> None:
        """Exchange the step's rows. Collective: ranks without rows call it, too."""
        self._part.gather(group)

    def discard(self) -> None:
        """Drop the rows of a step that was aborted."""
        self._part.discard()

    def commit(self) -> None:
        """Count the gathered rows: the step is applied."""
        logged_by_part, columns = self._part.pop_gathered()
        for logged in logged_by_part:
            for name, (total, divisor) in logged.items():
                self._count(name, total, divisor)
        if columns:
            self._count_rows(columns)

    @abstractmethod
    def _count_rows(self, columns: Arrays) -> None:
        """Count the columns of a whole step: outputs, then labels, then weights."""

    def _count(self, name: str, total: float, divisor: float) -> None:
        so_far, before = self.sums.get(name, (0.0, 0))
        self.sums[name] = (so_far + total, before + divisor)


def pack_metric_rows(logged: Logged, columns: Arrays) -> bytes:
    """Encode as one JSON line, followed by the numbers of the arrays."""
    head = json.dumps([logged, [[column.dtype.str, column.shape] for column in columns]])
    return b"".join([head.encode() + b"\n", *(column.tobytes() for column in columns)])


def unpack_metric_rows(blob: bytes) -> tuple[Logged, Arrays]:
    place = blob.index(b"\n") + 1
    (logged, kinds), columns = json.loads(blob[:place]), []
    for dtype, shape in kinds:
        column = np.frombuffer(blob, dtype, math.prod(shape), place).reshape(shape)
        columns.append(column.copy())  # which may be written, and is aligned
        place += column.nbytes
    return logged, columns


# ---- columns of all rows of a step


class Chunk(NamedTuple):
    """Rows that a rank computed at once, for a loss of all rows of a step (`loss_scope="step"`)."""

    rows: int  # their number
    columns: Arrays  # by tensor of the output, by label, and the weights


class Column(NamedTuple):
    """One of them, of all rows of the step."""

    values: npt.NDArray[Any]
    by_row: bool  # whether it has an entry for each row; else it is one value, which all rows share


class StepColumns(NamedTuple):
    """What a rank knows of the step once all have given their chunks."""

    columns: list[Column]
    first: int  # where the rows of this rank begin among those of the step
    reports: bool  # whether this rank has the step's first row: it alone reports the loss


def gather_columns(
    group: Group, chunks: Sequence[Chunk], pause: AbstractContextManager[None] | None = None
) -> StepColumns:
    """Exchange the chunks of all ranks inside of `pause`. Collective: ranks without rows call it, too.

    Raises InvalidInput as `join_chunks`, on all ranks alike.
    """
    counts: Logged = [{"rows": (chunk.rows, 0.0)} for chunk in chunks]
    packed = pack_metric_rows(counts, [column for chunk in chunks for column in chunk.columns])
    with pause or nullcontext():
        ranks = [_split(*unpack_metric_rows(blob)) for blob in group.allgather_bytes(packed)]
    first = sum(chunk.rows for chunks in ranks[: group.rank] for chunk in chunks)
    columns = join_chunks([chunk for chunks in ranks for chunk in chunks])
    return StepColumns(columns, first, not first and any(chunk.rows for chunk in chunks))


def _split(counts: Any, columns: Arrays) -> list[Chunk]:
    """The chunks of a rank."""
    each = len(columns) // max(len(counts), 1)
    rows = [int(count["rows"][0]) for count in counts]
    return [Chunk(own, columns[number * each :][:each]) for number, own in enumerate(rows)]


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
