"""The variables by which scripts learn their place: set anew in each world. Main thread only; writes `os.environ`."""

from __future__ import annotations

import os
import socket

from elastic_collectives import Group
from spark_elastic.protocol.types import World


def surround(world: World, group: Group, address: str) -> None:
    """Set MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and their kin, and Horovod's names for ranks and sizes.

    address: of this worker. The master is rank 0, the port one that was free there. Collective.

    Raises:
        CollectiveError: the group broke.
    """
    mine = f"{address} {_free_port(address)}".encode() if group.rank == 0 else b""
    master, _, port = group.allgather_bytes(mine)[0].decode().partition(" ")
    me = world.members[group.rank]
    os.environ.update(
        {
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
            "RANK": str(me.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(me.local_rank),
            "LOCAL_WORLD_SIZE": str(me.local_size),
            "HOROVOD_RANK": str(me.rank),
            "HOROVOD_SIZE": str(world.size),
            "HOROVOD_LOCAL_RANK": str(me.local_rank),
            "HOROVOD_LOCAL_SIZE": str(me.local_size),
            "HOROVOD_CROSS_RANK": str(me.cross_rank),
            "HOROVOD_CROSS_SIZE": str(me.cross_size),
            "HOROVOD_HOSTNAME": me.host,
            "HOROVOD_ELASTIC": "1",
        }
    )


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
