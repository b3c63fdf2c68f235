"""R6 (step summary): what ranks tell each other at the end of each exchange, and what they decide by it.

No rank acts on a request before the summaries are back, so all ranks stop at the same boundary. Sums run in rank order,
so that they have the same bits everywhere. Training thread only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group, MismatchError
from spark_elastic.protocol.types import MembershipVersion, Position

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


# The numbers of a summary as they travel. numpy's record types would take five times as long. After those of `_SAME`:
# version, rows, loss, denominator, seconds, wants_stop, has_weight.
_FORMAT = struct.Struct("<QQqqqQqqddd??")
_BEGIN = 48  # bytes of a summary before `version`, which are the same on all ranks
# What all ranks have in common, by what is wrong if they do not.
_SAME = {
    "worlds": ("attempt", "generation"),
    "positions": ("epoch", "phase", "step"),
    "models or gradient layouts": ("layout",),
}


class StepSummary(NamedTuple):
    """One rank's part."""

    position: Position  # of the step; the same on all ranks
    version: MembershipVersion  # the newest that the rank knows
    layout: int  # hash of how gradients are cut into buckets (R7, layout)
    rows: int  # of this rank in the step
    loss: float  # sum over these rows
    denominator: float  # this rank's part of what the sum of all ranks is divided by (R8, weighting)
    present: Flags  # (parameters,) which got a gradient
    found_sparse: Flags | None = None  # (parameters,) which got a sparse one; None: none of them
    wants_stop: bool = False  # a callback wants training to end after this step; the value of rank 0 counts
    seconds: float = 0.0  # that the rank worked for the step without waiting for others; 0.0: not measured
    has_weight: bool = True  # a row of the rank has a sample weight other than 0, or rows have none


class StepDecision(NamedTuple):
    version: MembershipVersion  # the newest that any rank knows
    rows: int  # of all ranks
    loss: float  # sum over all rows
    denominator: float  # what that sum is divided by (R8, weighting)
    present: Flags  # (parameters,) which got a gradient on any rank
    found_sparse: Flags  # (parameters,) which got a sparse one on any rank
    stops: bool = False  # training ends after this step
    seconds: tuple[float, ...] = ()  # by rank, `StepSummary.seconds`
    has_weight: bool = True  # a row of any rank has a sample weight other than 0, or rows have none

    def check_finite(self, position: Position) -> None:
        """Raises FloatingPointError if the loss of the step at `position` is not finite; on every rank alike."""
        if not math.isfinite(self.loss):
            raise FloatingPointError(
                f"the loss became {self.loss} in step {position.step} of epoch {position.epoch + 1}: look at these "
                "rows, or lower the learning rate (training ended before the update; terminate_on_nan=False continues)."
            )


def count_summary_bytes(parameters: int) -> int:
    return _FORMAT.size + -(-2 * parameters // 8)


def exchange_summaries(
    group: Group, mine: StepSummary, gather: Callable[[Bytes], Bytes] | None = None
) -> StepDecision:
    """Send this rank's summary, and decide from those of all ranks. Collective. gather: exchanges the bytes of all
    ranks, (size, bytes); None: the group does.

    Raises:
        MismatchError: ranks stand at different positions or cut their gradients differently; on every rank alike.
        CollectiveError: the group broke.
    """
    position, count, version = mine.position, len(mine.present), mine.version.encode()
    same = (*group.fence, position.epoch, position.phase, position.step, mine.layout)
    numbers = version, mine.rows, mine.loss, mine.denominator, mine.seconds
    header = _FORMAT.pack(*same, *numbers, mine.wants_stop, mine.has_weight)
    found_sparse = np.zeros(count, np.bool_) if mine.found_sparse is None else mine.found_sparse
    packed = _pack_flags(mine.present.tobytes(), found_sparse.tobytes())
    message = np.frombuffer(header + packed, np.uint8)
    gathered = group.allgather(message) if gather is None else gather(message)
    whole, ranks = gathered.tobytes(), len(gathered)
    fields = zip(*_build_format(len(packed)).iter_unpack(whole), strict=True)
    sames, versions, rows, losses, denominators, seconds, stops, weights, flags_of = fields
    if sames.count(header[:_BEGIN]) != ranks:
        _refuse_disagreement(group, [_FORMAT.unpack_from(row.tobytes()) for row in gathered])
    present = mine.present
    if flags_of.count(packed) != ranks:  # most steps have the same flags everywhere
        united = np.bitwise_or.reduce(gathered[:, _FORMAT.size :])
        flags = np.unpackbits(united, count=2 * count).view(np.bool_)
        present, found_sparse = flags[:count], flags[count:]
    newest = mine.version if max(versions) == version else MembershipVersion.decode(max(versions))
    loss, denominator = _sum_in_order(losses), _sum_in_order(denominators)
    return StepDecision(
        newest, sum(rows), loss, denominator, present, found_sparse, stops[0], seconds, any(weights)
    )


@lru_cache(maxsize=4)
def _build_format(flags: int) -> struct.Struct:
    """Of a summary, with what ranks have in common in one piece, and so many bytes of flags."""
    return struct.Struct(f"<{_BEGIN}sqqddd??{flags}s")


@lru_cache(maxsize=4)  # most steps have the flags of the step before
def _pack_flags(present: bytes, found_sparse: bytes) -> bytes:
    return np.packbits(np.frombuffer(present + found_sparse, np.bool_)).tobytes()


def _refuse_disagreement(group: Group, headers: Sequence[tuple[Any, ...]]) -> None:
    end = 0
    for what, fields in _SAME.items():
        begin, end = end, end + len(fields)
        values = [header[begin:end] for header in headers]
        odd = [rank for rank, its_values in enumerate(values) if its_values != values[0]]
        if odd:
            pairs = {rank: zip(fields, values[rank], strict=True) for rank in (0, *odd)}
            seen = "; ".join(f"rank {r}: {', '.join(f'{n} {v}' for n, v in pairs[r])}" for r in pairs)
            group.abort(f"ranks are in different {what}")
            raise MismatchError(odd, f"the ranks are in different {what} ({seen})")


def _sum_in_order(values: Iterable[float]) -> float:
    """Python's `sum` compensates for rounding since 3.12; this must have the same bits in every version."""
    total = 0.0
    for value in values:
        total += value
    return total
