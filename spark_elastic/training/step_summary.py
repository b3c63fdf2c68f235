"""The trailer of an exchange (R6): what ranks tell each other at its end. All draw the same conclusion from it.

Nobody acts on a wish before the trailer is back. Sums run in rank order, so that they have the same bits everywhere.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group, MismatchError
from spark_elastic.protocol.types import Position


class _Head(NamedTuple):
    """The numbers of a trailer, as they travel. numpy's record types would take five times as long."""

    attempt: int
    generation: int
    epoch: int
    phase: int
    step: int
    version: int
    layout: int
    rows: int
    loss: float
    denominator: float
    ends: bool


_FORM = struct.Struct("<QQqqqqQqdd?")


class StepSummary(NamedTuple):
    """One rank's part.

    version: newest membership version it heard of. rows: of its share. loss: sum of its rows' losses; denominator:
    what the sum over all ranks is divided by (R8). present, found_sparse: which parameters got a gradient, and which
    got one with rows missing (None: none), one bool each.
    ends: a callback wants training to end after this step; rank 0's value counts for all.
    """

    position: Position
    version: int
    layout: int
    rows: int
    loss: float
    denominator: float
    present: npt.NDArray[np.bool_]
    found_sparse: npt.NDArray[np.bool_] | None = None
    ends: bool = False


class StepDecision(NamedTuple):
    """What all ranks conclude."""

    version: int
    rows: int
    loss: float
    denominator: float
    present: npt.NDArray[np.bool_]
    found_sparse: npt.NDArray[np.bool_]
    ends: bool = False

    def check_finite(self, here: Position) -> None:
        """Raises FloatingPointError where the loss of the step at `here` is no number; on every rank alike."""
        if not math.isfinite(self.loss):
            raise FloatingPointError(
                f"the loss became {self.loss} in step {here.step} of epoch {here.epoch}: look at these rows, or lower "
                "the learning rate (terminate_on_nan=True ended the training before they were applied)."
            )


def exchange_summaries(group: Group, mine: StepSummary) -> StepDecision:
    """Send the trailer and read everyone's.

    Raises:
        MismatchError: ranks stand at different positions or cut their gradients differently; on every rank alike.
        CollectiveError: the group broke.
    """
    position = mine.position
    head = _Head(
        *group.fence,
        position.epoch,
        position.phase,
        position.step,
        mine.version,
        mine.layout,
        mine.rows,
        mine.loss,
        mine.denominator,
        mine.ends,
    )
    found_sparse = np.zeros_like(mine.present) if mine.found_sparse is None else mine.found_sparse
    marks = np.concatenate([mine.present, found_sparse])
    packed = np.packbits(marks).tobytes()
    gathered = group.allgather(np.frombuffer(_FORM.pack(*head) + packed, np.uint8))
    blobs = [blob.tobytes() for blob in gathered]
    heads = [_Head(*_FORM.unpack_from(blob)) for blob in blobs]
    _agree(group, heads)
    count = len(mine.present)
    anywhere = marks
    if any(blob[_FORM.size :] != packed for blob in blobs):  # most steps have the same everywhere
        anywhere = np.unpackbits(np.bitwise_or.reduce(gathered[:, _FORM.size :]), count=2 * count).view(
            np.bool_
        )
    return StepDecision(
        version=max(head.version for head in heads),
        rows=sum(head.rows for head in heads),
        loss=_in_order(head.loss for head in heads),
        denominator=_in_order(head.denominator for head in heads),
        present=anywhere[:count],
        found_sparse=anywhere[count:],
        ends=heads[0].ends,
    )


def _agree(group: Group, heads: Sequence[_Head]) -> None:
    first = heads[0]
    if all(head[:5] == first[:5] and head.layout == first.layout for head in heads):
        return
    for fields, what in (
        (("attempt", "generation"), "worlds"),
        (("epoch", "phase", "step"), "positions"),
        (("layout",), "models or gradient layouts"),
    ):
        told = [tuple(getattr(head, name) for name in fields) for head in heads]
        off = [rank for rank, each in enumerate(told) if each != told[0]]
        if off:
            seen = "; ".join(
                f"rank {rank}: {', '.join(f'{n} {v}' for n, v in zip(fields, told[rank], strict=True))}"
                for rank in (0, *off)
            )
            group.abort(f"ranks are in different {what}")
            raise MismatchError(off, f"the ranks are in different {what} ({seen})")


def _in_order(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total
