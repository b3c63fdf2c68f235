"""A slot as a process of its own: `python -m spark_elastic.local.slot`, started by `LocalLauncher`.

The order and the program come on standard input; why the slot ended goes to standard output. Main thread: the slot's
agent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import ElasticError
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.worker.entry import Header, die_with_parent
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.slot_agent import SlotAgent, SlotPlan

# What the launcher tells a slot's process, as one line of JSON. Values only.


ADDRESS = "127.0.0.1"  # all hosts are this machine, whatever their names


@dataclass(frozen=True)
class SlotSettings:
    """What of `ElasticConfig` concerns a slot, under its names."""

    collective_timeout: float = 20.0
    driver_timeout: float = 20.0
    spare_after: float = 0.0
    fork_workers: bool = False
    worker_port_range: tuple[int, int] | None = None
    cpus_per_worker: int | None = None

    @classmethod
    def of(cls, config: ElasticConfig) -> Self:
        return cls(**{named.name: getattr(config, named.name) for named in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class SlotOrder:
    """parent: process id of the launcher. key: hexadecimal. The others as in `Contact` and `Header`."""

    address: str
    key: str = field(repr=False)
    attempt: int
    certificate: str | None
    job: int
    host: str
    preload: tuple[str, ...]
    imports: tuple[str, ...]
    parent: int
    settings: SlotSettings

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        given: dict[str, Any] = json.loads(text)
        settings = _with_tuples(given.pop("settings"))
        return cls(**_with_tuples(given), settings=SlotSettings(**settings))

    @property
    def slot(self) -> str:
        return f"{self.job}-0"

    def header(self, status_fd: int, payload_bytes: int) -> Header:
        """For a training process, a child of this one."""
        return Header(
            parent=os.getpid(),
            address=self.address,
            key=self.key,
            attempt=self.attempt,
            slot=self.slot,
            bind=ADDRESS,
            port_range=self.settings.worker_port_range,
            preload=self.preload,
            collective_timeout=self.settings.collective_timeout,
            driver_timeout=self.settings.driver_timeout,
            payload_bytes=payload_bytes,
            status_fd=status_fd,
            threads=self.settings.cpus_per_worker,
            certificate=self.certificate,
            imports=self.imports,
        )


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def main() -> None:
    order = SlotOrder.from_json(sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read()
    # A death signal follows the spawning thread; the launcher's thread outlives its slot.
    die_with_parent(order.parent)
    # Ctrl-C reaches all processes of a terminal, and the driver ends the job; those that this one starts inherit it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clock = SystemClock()
    plan = SlotPlan(
        order.slot,
        order.job,
        order.host,
        {},
        payload,
        order.header,
        order.settings.driver_timeout,
        spare_after=order.settings.spare_after,
    )
    key = bytes.fromhex(order.key)
    with RendezvousClient(order.address, key, order.attempt, clock, certificate=order.certificate) as client:
        try:
            reason = SlotAgent(plan, client, clock).run()
        except ElasticError as error:
            reason = str(error)
        finally:
            fork_server_cache.close()
    sys.stdout.write(reason)


if __name__ == "__main__":
    main()
