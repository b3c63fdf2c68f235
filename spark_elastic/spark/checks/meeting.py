"""Do executors reach one another? Probes of one job exchange addresses through the store and dial each other.

Blocks in the task's thread for a few seconds at most. Probes that do not run side by side have nothing to say.
"""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.rendezvous.serving import Bind, dialled, listen

MEET_SECONDS = 5.0  # for those who have not come, and those who have not finished
DIAL_SECONDS = 3.0
LOOK_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class Meeting:
    """A folder of the store, and this probe's address."""

    store: Store
    folder: str
    address: str

    def hold(self, expected: int, clock: Clock) -> str | None:
        """The address of another that cannot be dialled; None where there is none. expected: probes in all."""
        # The kernel takes connections by itself.
        door = listen(Bind(self.address))
        own = f"{self.folder}/{uuid.uuid4().hex}"
        try:
            self.store.write_bytes(own, dialled(Bind(self.address), door).encode())
            there = self._await("", expected, clock) - {own}
            refused = next((name for name in sorted(there) if not self._dialled(name)), None)
            self.store.write_bytes(f"{own}.done", b"")
            self._await(".done", len(there) + 1, clock)
            return None if refused is None else self._address(refused)
        finally:
            self.store.delete(own)
            door.close()

    def _await(self, ending: str, expected: int, clock: Clock) -> set[str]:
        """What has that ending, once it is so many, or the time is over."""
        deadline = clock.now() + MEET_SECONDS
        while True:
            names = {name for name in self.store.list(self.folder) if name.endswith(".done") is bool(ending)}
            if len(names) >= expected or clock.now() > deadline:
                return names
            clock.sleep(LOOK_EVERY)

    def _dialled(self, name: str) -> bool:
        """Whether it answers, or is gone by now."""
        address = self._address(name)
        if address is None:
            return True
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), DIAL_SECONDS).close()
        except OSError:
            return self._address(name) is None
        return True

    def _address(self, name: str) -> str | None:
        try:
            return self.store.read_bytes(name).decode()
        except StoreError:
            return None
