"""The trailer of an exchange (R6): what the ranks tell each other, sent last; all draw the same conclusion from it.

Nobody acts on a wish before the trailer is back. Sums run in rank order, so that they have the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group, MismatchError
from spark_elastic.protocol.types import Position

_HEAD = np.dtype(
    [
        ("attempt", "<u8"),
        ("generation", "<u8"),
        ("epoch", "<i8"),
        ("phase", "<i8"),
        ("step", "<i8"),
        ("version", "<i8"),
        ("layout", "<u8"),
        ("rows", "<i8"),
        ("loss", "<f8"),
        ("denominator", "<f8"),
        ("bucket_bytes", "<i8"),
    ]
)


@dataclass(frozen=True)
class Trailer:
    """One rank's part.

    version: newest membership version it heard of. rows: of its share. loss: sum of its rows' losses; denominator:
    what the sum over all ranks is divided by (R8). present, found_sparse: which parameters got a gradient, and which
    got one with rows missing (None: none), one bool each. bucket_bytes: the next step's layout, as rank 0 wishes.
    """

    position: Position
    version: int
    layout: int
    rows: int
    loss: float
    denominator: float
    present: npt.NDArray[np.bool_]
    found_sparse: npt.NDArray[np.bool_] | None = None
    bucket_bytes: int = 0


@dataclass(frozen=True)
class Verdict:
    """What all ranks conclude."""

    version: int
    rows: int
    loss: float
    denominator: float
    present: npt.NDArray[np.bool_]
    found_sparse: npt.NDArray[np.bool_]
    bucket_bytes: int


def exchange(group: Group, mine: Trailer) -> Verdict:
    """Send the trailer and read everyone's.

    Raises:
        MismatchError: ranks stand at different positions or cut their gradients differently; on every rank alike.
        CollectiveError: the group broke.
    """
    head = np.zeros((), _HEAD)
    head["attempt"], head["generation"] = group.fence
    head["epoch"], head["phase"], head["step"] = mine.position.epoch, mine.position.phase, mine.position.step
    head["version"], head["layout"], head["rows"] = mine.version, mine.layout, mine.rows
    head["loss"], head["denominator"] = mine.loss, mine.denominator
    head["bucket_bytes"] = mine.bucket_bytes
    found_sparse = np.zeros_like(mine.present) if mine.found_sparse is None else mine.found_sparse
    marks = np.concatenate([mine.present, found_sparse])
    blob = np.frombuffer(head.tobytes() + np.packbits(marks).tobytes(), np.uint8)
    gathered = group.allgather(blob)
    heads = np.frombuffer(gathered[:, : _HEAD.itemsize].tobytes(), _HEAD)
    _agree(group, heads)
    masks = np.unpackbits(gathered[:, _HEAD.itemsize :], axis=1, count=len(marks)).astype(bool)
    present, found_sparse = np.split(np.logical_or.reduce(masks, axis=0), 2)
    return Verdict(
        version=int(heads["version"].max()),
        rows=int(heads["rows"].sum()),
        loss=_in_order(heads["loss"]),
        denominator=_in_order(heads["denominator"]),
        present=present,
        found_sparse=found_sparse,
        bucket_bytes=int(heads["bucket_bytes"][0]),
    )


def _agree(group: Group, heads: npt.NDArray[np.void]) -> None:
    for names, what in (
        (("attempt", "generation"), "worlds"),
        (("epoch", "phase", "step"), "positions"),
        (("layout",), "models or gradient layouts"),
    ):
        first = [heads[name][0] for name in names]
        off = [r for r in range(group.size) if [heads[name][r] for name in names] != first]
        if off:
            seen = "; ".join(
                f"rank {r}: {', '.join(f'{name} {heads[name][r]}' for name in names)}" for r in (0, *off)
            )
            group.abort(f"ranks are in different {what}")
            raise MismatchError(off, f"the ranks are in different {what} ({seen})")


def _in_order(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    total = 0.0
    for value in values:
        total += float(value)
    return total
