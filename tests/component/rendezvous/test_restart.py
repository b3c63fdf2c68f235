"""The event loop or its socket dies; port, board and open requests survive it."""

from __future__ import annotations

import ctypes
import logging
import queue
import socket
from collections.abc import Callable

import pytest

from spark_elastic.protocol.messages import Heartbeat, RequestNextWorld
from spark_elastic.protocol.types import MembershipVersion
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, WatchWorker
from tests.component.rendezvous.driver_side import PATIENCE, Driver, world
from tests.patience import until


def _kill_loop(driver: Driver) -> None:
    """Returns when another loop has taken the place of the killed one."""
    serving = driver.server._http_server
    assert serving is not None
    dead = serving._loop
    assert dead is not None
    dead.call_soon_threadsafe(dead.stop)
    until(lambda: serving._loop not in (dead, None))


def test_a_dead_loop_is_replaced_on_the_same_port(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    address = driver.server.address
    driver.server.publish(world(3, "1-0.1"))
    client = driver.client()
    worker = client
    watching = driver.call_in_thread(lambda: worker.ask(WatchWorker("1-0.1"), hold=MAX_POLL_SECONDS))
    driver.until_polls(1)
    with caplog.at_level(logging.WARNING):
        kill = driver.call_in_thread(lambda: _kill_loop(driver))
        # Said while nobody may be serving: it must not be lost.
        driver.server.announce(MembershipVersion(5))
        kill.result(PATIENCE)
        assert watching.result(PATIENCE).version == MembershipVersion(5)
    assert "starts again on the same port" in caplog.text
    assert driver.server.address == address
    # What was known is known still, and a break on the driver's side is no loss of the worker.
    known = worker.ask(RequestNextWorld("1-0.1"), hold=MAX_POLL_SECONDS).world
    assert known == world(3, "1-0.1").view_of("1-0.1")
    with pytest.raises(queue.Empty):
        driver.events.get_nowait()


def _kill_thread(driver: Driver) -> None:
    """Raise SystemExit inside the server's thread, wherever it is."""
    serving = driver.server._http_server
    assert serving is not None
    ident = ctypes.c_ulong(serving._thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1


def _break_socket(driver: Driver) -> None:
    """The listening socket is of no more use, as after a broken network stack."""
    serving = driver.server._http_server
    assert serving is not None
    serving.listener.shutdown(socket.SHUT_RDWR)


def _close_socket(driver: Driver) -> None:
    """Somebody closed descriptors that were not his, and then the loop dies, too."""
    serving = driver.server._http_server
    assert serving is not None
    serving.listener.close()
    _kill_loop(driver)


@pytest.mark.parametrize("harm", [_kill_thread, _break_socket, _close_socket])
def test_the_server_restarts_on_the_same_port_whatever_broke(
    harm: Callable[[Driver], None], driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    port = driver.port
    for _ in range(2):
        driver.client().ask(Heartbeat("1-0"))
        with caplog.at_level(logging.CRITICAL):
            harm(driver)
            # A client of its own has to connect anew.
            driver.client().ask(Heartbeat("2-0"))
    assert driver.port == port
