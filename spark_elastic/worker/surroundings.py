"""The variables by which scripts learn their place: set anew in each world. Main thread only; writes `os.environ`."""

from __future__ import annotations

import os
import random
import socket
import sys

from elastic_collectives import Group
from spark_elastic.protocol.types import World

# Not of those that a system gives to outgoing connections: one of them could take the port before the function does.
PORTS = (20_000, 32_767)
TRIES = 1_000


def surround(world: World, group: Group, address: str, ports: tuple[int, int] | None = None) -> None:
    """Set MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and their kin, and Horovod's names for ranks and sizes.

    address: of this worker. ports: first and last of those that it may listen on; None: any. The master is rank 0, the
    port one that was free there. Collective.

    Raises:
        CollectiveError: the group broke.
    """
    mine = f"{address} {free_port(address, ports or PORTS)}".encode() if group.rank == 0 else b""
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


def leave_process_group() -> None:
    """The one of torch.distributed that an earlier call of the function was done with, or could not go on with: there
    is one in a process, and the next call asks for its own."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def free_port(address: str, ports: tuple[int, int]) -> int:
    """One of these ports, both ends included, that nobody listens on at any address; 0 if none was found."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = ports
    dice = random.SystemRandom()  # the user's function may have set the seed of the other
    for port in dice.sample(range(first, last + 1), min(TRIES, last - first + 1)):
        with socket.socket(family) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return 0
