"""How a snapshot travels from one worker to others: into staging, verified by checksum (R5). Training thread only.

The picture is pickled: it comes from a peer of the mesh, which has proved that it holds the job's key.
"""

from __future__ import annotations

import pickle
import zlib

import cloudpickle
import numpy as np

from elastic_collectives import Group
from spark_elastic.errors import StoreError
from spark_elastic.state.commit import Bytes, Snapshot, SnapshotBuffer


def hand_over(group: Group, commits: SnapshotBuffer, source: int) -> Snapshot | None:
    """The snapshot of rank `source`, on all other ranks; None there. Collective over the whole group.

    What arrives lies in the spare memory of `commits`, which goes on as it is until it adopts the snapshot.

    Raises:
        CollectiveError: the group broke. StoreError: what arrived is not what was sent.
    """
    mine = commits.newest()
    if group.rank == source:
        assert mine is not None
        rest = np.frombuffer(pickled((mine.version, mine.picture)), np.uint8)
        head = np.array([rest.nbytes, mine.memory.nbytes, _crc(rest), _crc(mine.memory)], np.int64)
        for part in (head, rest, mine.memory):
            group.broadcast(part, source)
        return None
    head = np.zeros(4, np.int64)
    group.broadcast(head, source)
    rest, memory = np.empty(int(head[0]), np.uint8), commits.spare(int(head[1]))
    group.broadcast(rest, source)
    group.broadcast(memory, source)
    if (_crc(rest), _crc(memory)) != (int(head[2]), int(head[3])):
        raise StoreError("the state that arrived is not the one that was sent; it was not taken over.")
    version, picture = pickle.loads(rest.tobytes())
    return Snapshot(version, picture, memory)


def pickled(value: object) -> bytes:
    """By pickle, and what it refuses (classes of a script) by cloudpickle."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(cloudpickle.dumps(value))


def _crc(data: Bytes) -> int:
    return zlib.crc32(data.data)
