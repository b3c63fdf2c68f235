"""A state from one rank to others, as bytes, verified before anybody takes it over (R5). Main thread only."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elastic_collectives import Group
from spark_elastic.errors import StoreError

Bytes = npt.NDArray[np.uint8]


def handed_over(
    group: Group, source: int, receivers: Sequence[int], mine: tuple[Bytes, Bytes] | None
) -> tuple[Bytes, Bytes] | None:
    """Both parts of what rank `source` has, on the receivers; None elsewhere. Collective over the whole group.

    Raises:
        CollectiveError: the group broke.
        StoreError: what arrived is not what was sent.
    """
    rest, staging = mine or (np.empty(0, np.uint8), np.empty(0, np.uint8))
    head = np.array([rest.nbytes, staging.nbytes, _crc(rest), _crc(staging)], np.int64)
    group.broadcast(head, source)
    if mine is None:
        rest, staging = np.empty(int(head[0]), np.uint8), np.empty(int(head[1]), np.uint8)
    group.broadcast(rest, source)
    group.broadcast(staging, source)
    if mine is not None or group.rank not in receivers:
        return None
    if (_crc(rest), _crc(staging)) != (int(head[2]), int(head[3])):
        raise StoreError("the state that arrived is not the one that was sent; it was not taken over.")
    return rest, staging


def _crc(data: Bytes) -> int:
    return zlib.crc32(data.data)
