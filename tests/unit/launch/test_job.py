"""An interrupt leaves nothing behind, wherever it lands."""

from __future__ import annotations

import socket

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import FixedHosts
from spark_elastic.launch.job import Site, supervise
from spark_elastic.local.launcher import LocalLauncher
from spark_elastic.local.places import Hosts
from spark_elastic.protocol.types import Limits
from spark_elastic.rendezvous.server import RendezvousServer


def test_an_interrupt_right_behind_the_servers_start_frees_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = RendezvousServer.start, list[int]()

    def interrupted(self: RendezvousServer) -> None:
        start(self)
        started.append(int(self.address.rpartition(":")[2]))
        raise KeyboardInterrupt

    monkeypatch.setattr(RendezvousServer, "start", interrupted)
    hosts, clock = {"localhost": 1}, SystemClock()
    launcher = LocalLauncher(None, Hosts(hosts), clock)
    with pytest.raises(KeyboardInterrupt):
        supervise(
            launcher,
            FixedHosts(hosts, clock),
            Site(),
            Limits(1, 1, 1),
            ElasticConfig(),
            "job",
        )
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", started[0]))
