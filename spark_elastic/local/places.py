"""Where slot processes go: hosts of this machine by name, each with a number of slots, coming and going.

Shared by the threads of a launcher, which wait here for room, and discovery's, which says what hosts there are.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Protocol


class Places(Protocol):
    """Room for slots. `take` blocks until there is some and names the host, or returns None once closed."""

    def take(self, job: int) -> str | None: ...

    def give_back(self, host: str) -> None: ...

    def close(self) -> None: ...


class Hosts:
    """Named hosts with so many slots each, filled in the order in which they are listed; but where a slot has ended, it
    may be that the driver lets none in, so other hosts come first, and the one where that is longest ago."""

    def __init__(self, hosts: Mapping[str, int] | None = None) -> None:
        self._room = dict(hosts or {})
        self._taken: Counter[str] = Counter()
        self._ends: dict[str, int] = {}  # the number of the last slot's end there
        self._ended = 0
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
                free = [host for host, room in self._room.items() if self._taken[host] < room]
                if free:
                    host = min(free, key=lambda host: self._ends.get(host, 0))
                    self._taken[host] += 1
                    return host
                self._change.wait()
            return None

    def give_back(self, host: str) -> None:
        with self._change:
            self._taken[host] -= 1
            self._ended += 1
            self._ends[host] = self._ended
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


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
