"""What the driver needs of a cluster. `clusters.spark` implements it over Spark, `clusters.local` over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.slot_spec import SlotSpec

Post = Callable[[DriverEvent], None]


class Launcher(Protocol):
    """Launches slots: one job of the cluster per slot."""

    def start(self, spec: SlotSpec, post: Post) -> None:
        """Get ready to launch slots that are described by `spec`; `post` takes events from any thread."""
        ...

    def launch(self, launch: int) -> None:
        """Start the slot launch of that number, without blocking; its end is posted as `LaunchEnded`."""
        ...

    def close(self, timeout: float) -> list[str]:
        """Cancel the slots that still run and wait. Returns the names of those that did not end within `timeout`
        seconds."""
        ...


class Discovery(Protocol):
    """Watches the cluster's hosts, and posts `HostAppeared`, `HostLost` and `DrainRequested`."""

    def start(self, post: Post) -> None: ...

    def close(self) -> None: ...
