"""A make-believe cluster of processes for tests: every slot plays a host of its own unless told otherwise."""

from __future__ import annotations

import threading

from spark_elastic.clock import Clock
from spark_elastic.local.launcher import LocalLauncher


class NumberedHosts:
    """Room for so many slots, whose hosts are numbered after their jobs; further jobs stay pending, as at Spark."""

    def __init__(self, room: int, slots_per_host: int) -> None:
        self._room = threading.Semaphore(room)
        self._per_host = slots_per_host
        self._closed = threading.Event()

    def take(self, job: int) -> str | None:
        self._room.acquire()
        if self._closed.is_set():
            self._room.release()  # for the next one that waits
            return None
        return f"host-{job // self._per_host}"

    def give_back(self, host: str) -> None:
        self._room.release()

    def add(self, slots: int) -> None:
        self._room.release(slots)

    def close(self) -> None:
        self._closed.set()
        self._room.release()


class ProcessLauncher(LocalLauncher):
    """`LocalLauncher` on numbered hosts. room: how many slots this cluster has."""

    def __init__(
        self,
        program: object,
        clock: Clock,
        preload: tuple[str, ...] = (),
        slots_per_host: int = 1,
        room: int = 1000,
    ) -> None:
        self._hosts = NumberedHosts(room, slots_per_host)
        super().__init__(program, self._hosts, clock, preload)

    def add_room(self, slots: int) -> None:
        """New hosts arrive: pending slot jobs start."""
        self._hosts.add(slots)
