"""The port at which a function's own process group meets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from spark_elastic.worker.script import PORTS, find_free_port


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_that_somebody_listens_on_is_not_taken_nor_one_of_others(address: str) -> None:
    with socket.create_server(("127.0.0.2", 0)) as busy:  # at another address of this host
        port = busy.getsockname()[1]
        assert find_free_port("127.0.0.1", (port, port)) == 0
        assert find_free_port(address, (port + 1, port + 50)) in range(port + 1, port + 51)


def test_no_connection_that_goes_out_can_take_the_port() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert PORTS[1] < int(first)
    assert find_free_port("127.0.0.1", PORTS) in range(PORTS[0], PORTS[1] + 1)
