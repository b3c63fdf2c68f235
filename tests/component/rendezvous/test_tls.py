"""TLS for real: the job's certificate and no other, long polls that can be freed, and a status page of the same."""

from __future__ import annotations

import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import ConnectionClosed, DriverUnreachable, InvalidInput, Unauthorized
from spark_elastic.protocol import events
from spark_elastic.protocol.events import Received
from spark_elastic.protocol.messages import Heartbeat, WorkerExited
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.addresses import Bind
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, WatchSlot
from spark_elastic.rendezvous.status_app import StatusApp
from tests.component.rendezvous.cut_connections import CuttableNetwork
from tests.component.rendezvous.driver_side import (
    PATIENCE,
    Driver,
    Visitor,
    make_status_app,
    read_all,
    start_driver,
)


@pytest.fixture(scope="module")
def certificate() -> auth.Certificate:
    return auth.create_certificate()


@pytest.fixture
def status_app() -> StatusApp:
    return make_status_app()


@pytest.fixture
def driver(certificate: auth.Certificate, status_app: StatusApp) -> Iterator[Driver]:
    made = start_driver(Bind(certificate=certificate), status_app=status_app)
    yield made
    made.close()


def test_requests_and_long_polls_over_tls(driver: Driver) -> None:
    client = driver.client()
    assert client.ask(Heartbeat("1-0")).heartbeat_interval
    waiting = driver.call_in_thread(lambda: client.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS))
    driver.until_polls(1)
    client.close()
    with pytest.raises(ConnectionClosed):
        waiting.result(PATIENCE)
    assert not driver.await_event(events.ConnectionLost).reset, "it was closed, not lost on its way (R18)"


def test_another_certificate_is_refused_at_once(driver: Driver) -> None:
    """The right key does not help an impostor, nor does a certificate of the same name."""
    client = driver.client(certificate=auth.create_certificate().public)
    with pytest.raises(Unauthorized, match="does not show this job's certificate"):
        client.ask(Heartbeat("1-0"))
    assert driver.events.empty()


def test_a_client_of_a_tls_server_refuses_a_plain_one(certificate: auth.Certificate) -> None:
    plain = start_driver()
    try:
        client = plain.client(certificate=certificate.public, timeout=0.3)
        with pytest.raises(DriverUnreachable):
            client.ask(Heartbeat("1-0"))
        assert plain.events.empty()
    finally:
        plain.close()


def test_plain_requests_to_a_tls_server_get_no_answer(driver: Driver) -> None:
    client = driver.client(certificate=None, timeout=0.3)
    with pytest.raises(DriverUnreachable):
        client.ask(Heartbeat("1-0"))
    with socket.create_connection(("127.0.0.1", driver.port), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /status/ HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            assert b"HTTP" not in read_all(connection)
        except ConnectionResetError:
            return  # refused without reading what we sent
    assert driver.events.empty()


def test_a_recorded_session_cannot_be_played_again(driver: Driver, network: CuttableNetwork) -> None:
    with driver.client(address=network.address) as client:
        client.ask(WorkerExited("1-0", "1-0.1", 0))
    assert driver.await_event(WorkerExited).exit_code == 0
    assert len(network.recorded) > 1000
    for size in (len(network.recorded), len(network.recorded) // 2):
        with socket.create_connection(("127.0.0.1", driver.port), timeout=PATIENCE) as connection:
            connection.sendall(network.recorded[:size])
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                read_all(connection)
    driver.client().ask(Heartbeat("1-0"))
    first = driver.events.get(timeout=PATIENCE)
    assert isinstance(first, Received)
    assert first.message == Heartbeat("1-0")


def test_the_status_page_uses_tls(
    driver: Driver, status_app: StatusApp, certificate: auth.Certificate
) -> None:
    url = status_app.url(driver.server.url)
    assert url.startswith("https://")
    answer = Visitor(auth.create_pinned_context(certificate.public)).get(url)
    assert answer.status == 200
    assert answer.headers["set-cookie"].endswith("; Secure")


def test_the_private_key_stays_in_memory(certificate: auth.Certificate) -> None:
    assert "PRIVATE" not in certificate.public
    assert certificate.public.count("BEGIN CERTIFICATE") == 1


def test_a_given_certificate_is_served_with_its_chain(tmp_path: Path) -> None:
    """Expired, and signed by an authority that clients do not know: they take it, and nothing else that it signed."""
    _openssl(tmp_path, "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=ca -days 1")
    _openssl(tmp_path, "req -newkey rsa:2048 -nodes -keyout key.pem -out request -subj /CN=driver")
    for name, days in (("leaf", 0), ("other", 1)):
        signed = f"-CA ca.pem -CAkey ca.key -set_serial {days} -days {days}"
        _openssl(tmp_path, f"x509 -req -in request {signed} -out {name}.pem")
    chain, key = tmp_path / "chain.pem", str(tmp_path / "key.pem")
    chain.write_text((tmp_path / "leaf.pem").read_text() + (tmp_path / "ca.pem").read_text())
    given = auth.load_certificate(str(chain), key)
    assert given.public == (tmp_path / "leaf.pem").read_text()
    driver = start_driver(Bind(certificate=given))
    try:
        assert driver.client().ask(Heartbeat("1-0")).heartbeat_interval
        with pytest.raises(Unauthorized):
            driver.client(certificate=(tmp_path / "other.pem").read_text()).ask(Heartbeat("1-0"))
    finally:
        driver.close()
    for certificate in (tmp_path / "ca.pem", tmp_path / "nowhere"):
        with pytest.raises(InvalidInput, match="cannot be used"):
            auth.load_certificate(str(certificate), key)


@pytest.mark.parametrize(
    ("settings", "encrypted", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"tls": False}, True, False),
        ({"tls": True}, False, True),
        ({"tls_certificate": "nowhere", "tls_key": "nowhere"}, False, None),
    ],
)
def test_the_settings_decide_whether_there_is_a_certificate(
    settings: dict[str, Any], encrypted: bool, expected: bool | None
) -> None:
    config = ElasticConfig(**settings)
    if expected is None:
        with pytest.raises(InvalidInput, match="nowhere"):
            auth.select_certificate(config, encrypted)
    else:
        assert (auth.select_certificate(config, encrypted) is not None) is expected


def _openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)


def test_encryption_without_openssl_is_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match="tls needs the program openssl on the driver"):
        auth.create_certificate()
    broken = tmp_path / "openssl"
    broken.write_text("#!/bin/sh\necho no curve >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(InvalidInput, match=r"could not make a certificate \(no curve\)"):
        auth.create_certificate()
    with pytest.raises(InvalidInput, match="cannot be read"):
        auth.create_pinned_context("nonsense")
