"""Reaching the driver: proxies, IPv6, addresses that cannot be bound, and drivers that do not answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.errors import DriverUnreachable, InvalidInput, Unauthorized
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.addresses import Bind, find_address_towards
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES, MAX_POLL_SECONDS, LogLines, WatchSlot
from spark_elastic.rendezvous.server import RendezvousServer, ServerCallbacks
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, PATIENCE, Driver, start_driver

RECIPIENTS = ServerCallbacks(lambda event: None, lambda lines: None)


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """Accepts connections (the kernel does) and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _server(bind: Bind) -> RendezvousServer:
    return RendezvousServer(KEY, ATTEMPT, RECIPIENTS, SystemClock(), bind)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="the kernel has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])  # Spark writes brackets
def test_clients_reach_the_server_over_ipv6(host: str) -> None:
    assert find_address_towards(host, 1) == "::1"
    driver = start_driver(Bind(host))
    try:
        assert driver.server.address.startswith("[::1]:")
        assert driver.client().ask(Heartbeat("1-0")).heartbeat_interval
    finally:
        driver.close()


def test_only_the_given_address_is_bound(driver: Driver) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", driver.port), timeout=5)


def test_clients_dial_the_advertised_address() -> None:
    driver = start_driver(Bind("0.0.0.0", advertise="localhost"))
    try:
        assert driver.server.address == f"localhost:{driver.port}"
        assert driver.client().ask(Heartbeat("1-0")).heartbeat_interval
    finally:
        driver.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_every_interface_needs_an_address_to_advertise(host: str) -> None:
    with pytest.raises(InvalidInput, match="set advertise_address"):
        _server(Bind(host))


def test_an_address_that_cannot_be_bound_is_named(deaf: socket.socket) -> None:
    port = deaf.getsockname()[1]
    said = rf"The driver cannot listen on 127\.0\.0\.1 port {port} .*driver_port"
    with pytest.raises(InvalidInput, match=said):
        _server(Bind("127.0.0.1", port)).start()
    with pytest.raises(InvalidInput, match=r"192\.0\.2\.1 .*bind_address"):
        _server(Bind("192.0.2.1")).start()


def test_a_driver_that_does_not_answer_is_named_by_host_and_port(deaf: socket.socket) -> None:
    with socket.socket() as unlistened:
        unlistened.bind(("127.0.0.1", 0))
        _assert_unreachable(f"127.0.0.1:{unlistened.getsockname()[1]}")
    _assert_unreachable(f"127.0.0.1:{deaf.getsockname()[1]}")
    _assert_unreachable("no-such-host.invalid:5")


SESSION = json.dumps({"session": "0" * 32})
OK = "HTTP/1.1 200 OK\r\n"
FORGED = (
    f"{auth.REPLY_HEADER}: {'0' * auth.SIGNATURE_DIGITS}\r\ncontent-length: {len(SESSION)}\r\n\r\n{SESSION}"
)


@pytest.mark.parametrize(
    ("said", "error", "why"),
    [
        ("SSH-2.0-OpenSSH\r\n\r\n", DriverUnreachable, r"does not answer \(what came is not HTTP"),
        (f"{OK}content-length: {10**14}\r\n\r\n", DriverUnreachable, f"answer of {10**14} bytes"),
        (f"{OK}{FORGED}", Unauthorized, "does not hold this job's key"),
    ],
    ids=["a wrong port", "an answer that would take all memory", "a reply signed without the key"],
)
def test_another_server_at_the_drivers_address_is_refused(
    said: str, error: type[Exception], why: str, deaf: socket.socket
) -> None:
    def answer() -> None:
        with suppress(OSError):
            while True:
                accepted, _ = deaf.accept()
                with accepted:
                    accepted.sendall(said.encode())
                    accepted.recv(65536)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with (
            RendezvousClient(f"127.0.0.1:{deaf.getsockname()[1]}", KEY, ATTEMPT, SystemClock()) as client,
            pytest.raises(error, match=why),
        ):
            client.ask(Heartbeat("1-0"), within=0.3)
    finally:
        deaf.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def test_a_request_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    with RendezvousClient("127.0.0.1:1", KEY, ATTEMPT, SystemClock()) as client:
        with pytest.raises(InvalidInput, match=r"refuses a request of 8388\d{3} bytes as too large"):
            client.ask(LogLines("1-0", None, None, ("x" * MAX_BODY_BYTES,)))


def _assert_unreachable(address: str) -> None:
    clock = SystemClock()
    client = RendezvousClient(address, KEY, ATTEMPT, clock)
    began = clock.now()
    try:
        with pytest.raises(DriverUnreachable, match=rf"{address} does not answer \("):
            client.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS, within=0.3)
    finally:
        client.close()
    # By default 30 s, the hold of a poll included; here 0.3 s, and what a busy machine adds.
    assert clock.now() - began < 10


def test_a_driver_that_stops_answering_is_named_and_reached_again_when_it_continues(driver: Driver) -> None:
    """Its loop hangs while a poll is open; the hold of the poll is no reason to wait longer than `timeout`."""
    wake = threading.Event()
    client = driver.client(timeout=3.0)  # the answer has a second after the hold
    # An idle poll ends in time, though asked to be held for long.
    assert client.ask(WatchSlot("1-0"), hold=20.0).release is None
    client.timeout = 0.6
    driver.server._submit(lambda: wake.wait(PATIENCE) and None)
    try:
        with pytest.raises(DriverUnreachable, match=f"{driver.server.address} does not answer"):
            client.ask(WatchSlot("1-0"), hold=20.0)
    finally:
        wake.set()
    assert driver.client().ask(Heartbeat("1-0")).heartbeat_interval


def test_a_key_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(InvalidInput, match="16"):
        RendezvousServer(b"short", ATTEMPT, RECIPIENTS, SystemClock())


def test_a_driver_of_another_job_is_refused(driver: Driver) -> None:
    with pytest.raises(Unauthorized, match="does not accept this job's key"):
        driver.client(key=b"another key").ask(Heartbeat("1-0"))
    assert driver.events.empty()
