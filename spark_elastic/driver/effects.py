"""Carries out the driver machine's commands on the server and the launcher. Called from the driver loop's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from spark_elastic.driver.ports import Launcher
from spark_elastic.protocol import commands as do
from spark_elastic.protocol.types import Checkpoint, World
from spark_elastic.rendezvous.server import RendezvousServer


class Audience(Protocol):
    """Who is told what becomes of the job's worlds."""

    def world(self, world: World) -> None: ...

    def over(self, reason: str) -> None: ...

    def announces(self, text: str) -> None: ...


Publisher: TypeAlias = Callable[[tuple[Checkpoint, ...]], None]
"""Makes checkpoints count, newest first, and deletes others; returns at once."""


class Effects:
    """Maps each command to one call; nothing here decides."""

    def __init__(
        self, server: RendezvousServer, launcher: Launcher, audience: Audience, publisher: Publisher
    ) -> None:
        self._publisher = publisher
        self._server = server
        self._launcher = launcher
        self._audience = audience

    def carry_out(self, command: do.DriverCommand) -> None:
        """Execute without blocking."""
        match command:
            case do.LaunchSlot(_, job):
                self._launcher.launch(job)
            case do.Publish(_, world):
                self._server.publish(world)
                self._audience.world(world)
            case do.Abort(reason, fence):
                self._server.abort(fence, reason)
                self._audience.over(reason)
            case do.Announce(reason, version):
                self._server.announce(version, reason)
            case do.StopWorker(reason, worker, kill):
                self._server.stop_worker(worker, reason, kill)
            case do.ReleaseSlot(reason, slot):
                self._server.release_slot(slot, reason)
            case do.PublishCheckpoint(_, kept):
                self._publisher(kept)
            case do.Remark(reason):
                self._audience.announces(reason)
            case do.End(reason):
                self._server.end(reason)
