"""P6 against what nobody thought of: each endpoint of a real server under generated requests, with and without key.

Whoever lacks the key gets 4xx or is hung up on; who has it gets an answer that is signed. Nothing ends in a 500, and an
honest slot is served afterwards.
"""

from __future__ import annotations

import http.client
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from spark_elastic.protocol.messages import DriverRequest, Heartbeat
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.messages import REQUESTS, path_of
from tests.component.rendezvous.driver_side import (
    PATIENCE,
    Driver,
    RawClient,
    make_status_app,
    start_driver,
    world,
)
from tests.component.rendezvous.generated_requests import ask_without_key, for_pages, of_noise, with_key


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """With the status page; one server for all, since each test asks whether it still serves."""
    made = start_driver(status_app=make_status_app())
    made.server.publish(world(1, "0-0.1"))
    yield made
    made.close()


@pytest.fixture
def asking(driver: Driver, caplog: pytest.LogCaptureFixture) -> Iterator[http.client.HTTPConnection]:
    """A connection, dialled again when the server hangs up; afterwards all is as before."""
    connection = http.client.HTTPConnection("127.0.0.1", driver.port, timeout=PATIENCE)
    yield connection
    connection.close()
    with driver.client() as honest:
        assert honest.ask(Heartbeat("9-0")).heartbeat_interval
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("request_class", REQUESTS, ids=path_of)
def test_any_signed_request_is_answered(
    asking: http.client.HTTPConnection, request_class: type[DriverRequest[Any]]
) -> None:
    with_key(asking, request_class)()


def test_unsigned_requests_get_no_information(driver: Driver, asking: http.client.HTTPConnection) -> None:
    while not driver.events.empty():
        driver.events.get()
    ask_without_key(asking)()
    assert driver.events.empty()


HEADERS = (
    "host", "authorization", "content-length", "transfer-encoding", "connection", "expect", "upgrade", "cookie",
    "content-type", "content-encoding", "accept-encoding", "origin", "referer", "range", "te", "trailer", "x-unknown",
    "x-forwarded-for", "x-forwarded-prefix", "x-http-method-override", "x-elastic-signature",
)  # fmt: skip
HOSTILE = (
    "", "0", "-1", "1e9", "9" * 400, "0x10", "chunked", "close", "100-continue", "gzip", "../../etc/passwd", "%s%n",
    "${jndi:x}", "\xff" * 99, "a,b", "Elastic ..", "Elastic " + "0" * 32 + ".1." + "0" * 32, "x" * 15_000,
)  # fmt: skip
PATHS = [auth.HELLO, *map(path_of, REQUESTS), "/status/", "/metrics"]


@pytest.mark.parametrize("header", HEADERS)
def test_a_hostile_value_in_any_header_of_any_route_is_refused_or_means_nothing(
    driver: Driver, asking: http.client.HTTPConnection, header: str
) -> None:
    """Of a request that is signed, so that nothing else is wrong with it."""
    client = RawClient(driver.port)
    session = client.session()
    chance = random.Random(header)
    for path in PATHS:
        for value in chance.sample(HOSTILE, 3):
            signed = client.sign(path, b"{}", session)
            given = f"{value}, close" if header == "connection" else value
            status, _ = client.request(path, b"{}", signed, more={header: given})
            assert status in (0, 400, 401, 404, 408, 413), (path, value)


def test_connections_that_send_garbage_are_closed(driver: Driver, asking: http.client.HTTPConnection) -> None:
    of_noise(driver.port)()


def test_the_status_page_needs_its_token(asking: http.client.HTTPConnection) -> None:
    for_pages(asking)()
