"""What the driver needs of a cluster. `spark_elastic.spark` implements it over Spark, `spark_elastic.testing` over
plain processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spark_elastic.protocol.events import DriverEvent

Post = Callable[[DriverEvent], None]


@dataclass(frozen=True)
class Contact:
    """What a slot task needs to reach its driver. `key` is the job's secret: it travels inside the cluster's own
    task channel, never in a command line or an environment. certificate: of the driver's server,
    PEM; None: plain HTTP."""

    address: str
    key: bytes = field(repr=False)
    attempt: int
    job_name: str
    certificate: str | None = None


class Launcher(Protocol):
    """Carries slots: one job of the cluster per slot."""

    def start(self, contact: Contact, post: Post) -> None:
        """Get ready; `post` takes events from any thread."""
        ...

    def launch(self, job: int) -> None:
        """Start the slot job of that number, without blocking; its end is posted as `LaunchEnded`."""
        ...

    def close(self, timeout: float) -> list[str]:
        """Cancel what still runs and wait; returns what did not end in time, by name."""
        ...


class Discovery(Protocol):
    """Watches which hosts are there, and posts `HostAppeared`, `HostLost` and `DrainRequested`."""

    def start(self, post: Post) -> None: ...

    def close(self) -> None: ...
