"""A slot as a process of its own (`python -m`), started by `LocalLauncher` or through ssh.

Standard input brings a line with what the slot is, then the pickled program. The reason why the slot ended goes to
standard output. On another host a thread waits for the end of standard input, which is that of the ssh connection or
of the launcher, and kills this process."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, replace

from spark_elastic.clock import SystemClock
from spark_elastic.errors import ElasticError
from spark_elastic.protocol.types import SlotIdentity, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.addresses import find_address_towards, split_address
from spark_elastic.rendezvous.client import CONNECT_SECONDS, RendezvousClient
from spark_elastic.worker.entry import die_with_parent
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.slot_agent import SlotAgent

REFUSED = 3  # exit code of a host that cannot run slots; standard output says why


@dataclass(frozen=True)
class LocalSlot:
    """What the launcher tells a slot's process."""

    spec: SlotSpec  # the same for all slots of the job
    identity: SlotIdentity  # of this slot
    parent: int | None  # process id of the launcher; None: it is on another host
    size: int = 0  # bytes of the pickled program, which follow


def main() -> None:
    slot = codec.from_line(LocalSlot, sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read(slot.size)
    if slot.parent is None:
        _die_with_standard_input()
        _check_way_to_driver(slot.spec.address)
    else:
        # The death signal follows the thread that started this process: the launcher's, which lives as long as its
        # slot.
        die_with_parent(slot.parent)
    # Ctrl-C reaches all processes of a terminal, but the driver ends the job. Child processes inherit this setting.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sys.stdout.write(serve(slot, payload))
    finally:
        fork_server_cache.close()


def serve(slot: LocalSlot, payload: bytes) -> str:
    """Be the slot until it ends; returns why it has."""
    spec, clock = slot.spec, SystemClock()
    known = spec.address, spec.key, spec.attempt, clock
    with RendezvousClient(*known, certificate=spec.certificate) as client:
        try:
            identity = replace(slot.identity, address=find_address_towards(*split_address(spec.address)))
            return SlotAgent(spec, identity, payload, client, clock).run()
        except ElasticError as error:
            return str(error)


def check() -> None:
    """End with `REFUSED` if slots of this host could not reach the driver whose address standard input brings."""
    _check_way_to_driver(sys.stdin.readline().strip())


def _check_way_to_driver(address: str) -> None:
    """A slot would try for as long as a driver may be silent; at the start the first failure is the answer."""
    try:
        socket.create_connection(split_address(address), CONNECT_SECONDS).close()
    except OSError as error:
        sys.stdout.write(
            f"it cannot reach the driver at {address} ({error}): open the port between the hosts "
            "(SPARK_ELASTIC_DRIVER_PORT makes it a fixed one), or set SPARK_ELASTIC_ADVERTISE_ADDRESS to an address of "
            "the driver that all hosts reach"
        )
        sys.stdout.flush()
        os._exit(REFUSED)


def _die_with_standard_input() -> None:
    """Child processes do not inherit the connection: their standard input is empty."""
    connection = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while os.read(connection, 1):
            pass  # nothing is sent
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="spark-elastic-connection", daemon=True).start()


if __name__ == "__main__":
    main()
