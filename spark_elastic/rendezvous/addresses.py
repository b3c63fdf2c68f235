"""Addresses of this machine, as seen on the way to another one, and sockets that listen on them. Any thread."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_elastic.errors import DriverUnreachable, InvalidInput

if TYPE_CHECKING:
    from spark_elastic.rendezvous.auth import Certificate

LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # connections that the kernel holds until they are accepted


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def find_address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to the driver, where peers of the cluster reach it, too.
    Raises DriverUnreachable: there is no way to that host."""
    try:
        answers = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = answers[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DriverUnreachable(
            f"There is no way to the driver's rendezvous server at {host}:{port} ({error}): set advertise_address to "
            "a name or address that executors know."
        ) from error


def is_loopback(host: str) -> bool:
    """Whether a name or an address says by itself that it is reached on this machine alone."""
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")


def is_own_address(host: str) -> bool:
    """Whether a name or an address is one of this machine's."""
    try:
        answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # the name is unknown, or none
    for family, kind, protocol, _, address in answers:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # works for this machine's own addresses only
            return True
        except OSError:
            continue
    return False


@dataclass(frozen=True)
class Bind:
    host: str = LOOPBACK  # a name or an IPv4 or IPv6 address of this machine; brackets around it do not count
    port: int = 0  # 0: any free one
    advertise: str | None = None  # what clients dial instead of `host`
    certificate: Certificate | None = None  # None: plain HTTP


def listen(bind: Bind) -> socket.socket:
    """A listening socket; `InvalidInput`: the address is not one of this machine, or the port is taken."""
    try:
        host, passive = bind.host.strip("[]"), socket.AI_PASSIVE
        answers = socket.getaddrinfo(host, bind.port, type=socket.SOCK_STREAM, flags=passive)
        family, kind, protocol, _, address = answers[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidInput(
            f"The driver cannot listen on {bind.host} port {bind.port} ({error}): "
            "set bind_address to an address of this machine and driver_port to a free port or 0."
        ) from error
    listener.setblocking(False)
    return listener


def listen_on_loopback(listener: socket.socket) -> socket.socket | None:
    """On the same port of localhost, where proxies of notebooks connect; None if it is taken, as by `listener`."""
    try:
        return listen(Bind(LOOPBACK, listener.getsockname()[1]))
    except InvalidInput:
        return None


def format_address(bind: Bind, listener: socket.socket) -> str:
    """What clients of `listener` dial: "host:port", or "[host]:port" for IPv6."""
    host, port = (bind.advertise or bind.host).strip("[]"), listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
