"""`close` ends waits at once and leaves nothing behind (the test-wide leak check looks at threads and descriptors)."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from typing import Any

import pytest

from spark_elastic.errors import ConnectionClosed
from spark_elastic.protocol import events
from tests.component.rendezvous.driver_side import PATIENCE, Driver, world


def test_closing_a_client_frees_all_its_threads(driver: Driver) -> None:
    client = driver.client()
    worker = client.worker("1-0.1", "1-0")
    driver.server.publish(world(1, "2-0.1"))
    waits: list[Future[Any]] = [
        driver.aside(lambda: worker.join(None, None)),
        driver.aside(lambda: worker.watch(None, 0)),
        driver.aside(lambda: client.slot("1-0").watch(0)),
    ]
    driver.until_polls(3)
    client.close()
    for wait in waits:
        with pytest.raises(ConnectionClosed):
            wait.result(PATIENCE)
    with pytest.raises(ConnectionClosed):
        worker.join(None, None)
    client.close()


def test_closing_a_client_frees_a_thread_that_waits_to_dial_again(driver: Driver) -> None:
    unreachable = driver.client(address="127.0.0.1:1")
    wait = driver.aside(lambda: unreachable.slot("1-0").beat())
    unreachable.close()
    with pytest.raises(ConnectionClosed):
        wait.result(PATIENCE)


def test_closing_the_server_answers_what_is_open(driver: Driver) -> None:
    worker = driver.client().worker("1-0.1", "1-0")
    join = driver.aside(lambda: worker.join(None, None))
    driver.heard(events.WorkerJoins)
    driver.server.close()
    assert join.result(PATIENCE).stop == "the driver has closed"


def test_a_closed_clients_connections_are_closed_once_its_threads_left(driver: Driver) -> None:
    client = driver.client()
    for _ in range(3):
        client.slot("1-0").beat()
    client.close()
    gc.collect()
    assert not [s for s in client._wire._sockets if s.fileno() >= 0]
