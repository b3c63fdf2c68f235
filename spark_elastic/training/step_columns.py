"""What a loss of all rows of a step sees (`loss_scope="step"`): columns of all ranks, in the order of the step's rows.

Each rank gives the outputs of its model, labels and weights, in the chunks in which it computed them, and receives all.
Knows no framework. Training thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.training.batch import Arrays, Logged, pack_metric_rows, unpack_metric_rows
from spark_elastic.training.trainer import WorkClock


class Chunk(NamedTuple):
    """Rows that a rank computed at once."""

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


def gather_columns(group: Group, chunks: Sequence[Chunk], work: WorkClock | None = None) -> StepColumns:
    """Exchange the chunks of all ranks. Collective: ranks without rows call it, too.

    Raises:
        InvalidInput: the outputs of the chunks do not make one output of all rows; on all ranks alike.
    """
    counts: Logged = [{"rows": (chunk.rows, 0.0)} for chunk in chunks]
    packed = pack_metric_rows(counts, [column for chunk in chunks for column in chunk.columns])
    with nullcontext() if work is None else work.pause():
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
    """The columns of all these rows.

    Raises:
        InvalidInput: they do not make one output of all rows.
    """
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
