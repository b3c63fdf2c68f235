"""`close` ends waits at once and leaves nothing behind (the test-wide leak check looks at threads and descriptors)."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from typing import Any

import pytest

from spark_elastic.errors import ConnectionClosed
from spark_elastic.protocol.messages import Heartbeat, RequestNextWorld
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, WatchSlot, WatchWorker
from tests.component.rendezvous.driver_side import PATIENCE, Driver, world


def test_closing_a_client_frees_all_its_threads(driver: Driver) -> None:
    client = driver.client()
    worker = client
    driver.server.publish(world(1, "2-0.1"))
    waits: list[Future[Any]] = [
        driver.call_in_thread(
            lambda: worker.ask(RequestNextWorld("1-0.1", None, None), hold=MAX_POLL_SECONDS)
        ),
        driver.call_in_thread(lambda: worker.ask(WatchWorker("1-0.1"), hold=MAX_POLL_SECONDS)),
        driver.call_in_thread(lambda: client.ask(WatchSlot("1-0", 0), hold=MAX_POLL_SECONDS)),
    ]
    driver.until_polls(3)
    client.close()
    for wait in waits:
        with pytest.raises(ConnectionClosed):
            wait.result(PATIENCE)
    with pytest.raises(ConnectionClosed):
        worker.ask(RequestNextWorld("1-0.1", None, None), hold=MAX_POLL_SECONDS)
    client.close()


def test_closing_a_client_frees_a_thread_that_waits_to_dial_again(driver: Driver) -> None:
    unreachable = driver.client(address="127.0.0.1:1")
    wait = driver.call_in_thread(lambda: unreachable.ask(Heartbeat("1-0")))
    unreachable.close()
    with pytest.raises(ConnectionClosed):
        wait.result(PATIENCE)


def test_closing_the_server_answers_open_requests(driver: Driver) -> None:
    worker = driver.client()
    join = driver.call_in_thread(
        lambda: worker.ask(RequestNextWorld("1-0.1", None, None), hold=MAX_POLL_SECONDS)
    )
    driver.await_event(RequestNextWorld)
    driver.server.close()
    assert join.result(PATIENCE).stop == "the driver has closed"


def test_a_closed_clients_connections_are_closed_once_its_threads_left(driver: Driver) -> None:
    client = driver.client()
    for _ in range(3):
        client.ask(Heartbeat("1-0"))
    client.close()
    gc.collect()
    assert not client._sockets
