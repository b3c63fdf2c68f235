"""Where slot processes go: hosts of this machine by name, each with a number of slots, coming and going.

Shared by the threads of a launcher, which wait here for room, and discovery's, which says what hosts there are.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from spark_elastic.errors import InvalidInput


class Places(Protocol):
    """Room for slots. `take` blocks until there is some and names the host, or returns None once closed."""

    def take(self, job: int) -> str | None: ...

    def give_back(self, host: str) -> None: ...

    def close(self) -> None: ...


class Hosts:
    """Named hosts with so many slots each, filled in the order in which they are listed."""

    def __init__(self, hosts: Mapping[str, int] | None = None) -> None:
        self._room = dict(hosts or {})
        self._taken: Counter[str] = Counter()
        self._closed = False
        self._change = threading.Condition()

    def list(self, hosts: Mapping[str, int]) -> None:
        """Discovery's newest answer; slots of hosts that are gone stay where they are until the driver ends them."""
        with self._change:
            self._room = dict(hosts)
            self._change.notify_all()

    def take(self, job: int) -> str | None:
        with self._change:
            while not self._closed:
                host = next((host for host, room in self._room.items() if self._taken[host] < room), None)
                if host is not None:
                    self._taken[host] += 1
                    return host
                self._change.wait()
            return None

    def give_back(self, host: str) -> None:
        with self._change:
            self._taken[host] -= 1
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


def parse_hosts(text: str, default_slots: int | None = None) -> dict[str, int]:
    """Hosts and their slots of "h1:2,h2:4", or one `host[:slots]` a line; # begins a comment.

    "host slots=4", as in MPI's host files, is taken, too.

    Raises:
        InvalidInput: an entry that is none, without a number of slots where there is no default, or twice.
    """
    found: dict[str, int] = {}
    lines = [line.partition("#")[0] for line in text.splitlines()]
    for entry in (part.strip() for line in lines for part in line.split(",")):
        if not entry:
            continue
        host, slots = _parse(entry, default_slots)
        if host in found:
            raise InvalidInput(f"host {host} is named twice: name each once, with all its slots.")
        found[host] = slots
    return found


def _parse(entry: str, default_slots: int | None) -> tuple[str, int]:
    host, _, slots = (
        entry.replace(" slots=", ":").rpartition(":")
        if ":" in entry or " slots=" in entry
        else (entry, "", "")
    )
    if not slots and default_slots is not None:
        return host, default_slots
    if not slots.strip().isdigit() or not host.strip() or " " in host.strip():
        raise InvalidInput(f"{entry!r} is no host with a number of slots: write host:slots, as in node1:2.")
    return host.strip(), int(slots)


def foreign(hosts: Mapping[str, int]) -> list[str]:
    """Those that are not this machine."""
    return [host for host in hosts if not _is_here(host)]


def _is_here(host: str) -> bool:
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # nobody knows it
    for family, kind, protocol, _, address in answers:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # works for this machine's own addresses only
            return True
        except OSError:
            continue
    return False
