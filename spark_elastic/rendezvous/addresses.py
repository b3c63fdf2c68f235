"""Addresses of this machine, as seen on the way to another one. Any thread; no state."""

from __future__ import annotations

import socket

from spark_elastic.errors import DriverUnreachable


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
