"""This machine's address as others of the cluster know it. Any thread; no state."""

from __future__ import annotations

import socket

from spark_elastic.errors import DriverUnreachable


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to the driver: peers of the same cluster reach it there, too."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DriverUnreachable(
            f"There is no way to the driver's rendezvous server at {host}:{port} ({error}): set advertise_address to "
            "a name or address that executors know."
        ) from error


def own_address(towards: str | None) -> str:
    """This machine's address on the way to a host; if that host is unknown here, the address of this machine's name."""
    if towards is not None:
        try:
            return address_towards(towards, 1)
        except DriverUnreachable:
            pass  # a name that executors of some clusters do not know
    return socket.gethostbyname(socket.gethostname())
