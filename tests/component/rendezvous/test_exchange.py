"""Where members of a world find each other, and the key-value store."""

from __future__ import annotations

import pytest

from spark_elastic.errors import InvalidInput, StaleGeneration
from spark_elastic.protocol.messages import RequestNextWorld
from spark_elastic.protocol.types import Fence
from spark_elastic.rendezvous import server_state
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, FindAddresses, GetValues, SetValues
from tests.component.rendezvous.driver_side import ATTEMPT, PATIENCE, Driver, world

WORKERS = ("1-0.1", "2-0.1", "3-0.1")
FENCE = Fence(ATTEMPT, 1)


def _ask_for_worlds(driver: Driver) -> None:
    for number, worker in enumerate(WORKERS):
        request = RequestNextWorld(worker, address=f"host-{number}:7000")
        assert driver.client().ask(request, hold=0.0).is_undecided


@pytest.mark.parametrize("small_world", [3, 2])
def test_members_of_a_small_world_are_told_all_addresses(
    driver: Driver, small_world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "SMALL_WORLD", small_world)
    _ask_for_worlds(driver)
    driver.server.publish(world(1, *WORKERS[::-1]))
    client = driver.client()
    of_all = "host-2:7000", "host-1:7000", "host-0:7000"
    told = client.ask(RequestNextWorld(WORKERS[0], address="host-0:7000"), hold=MAX_POLL_SECONDS)
    assert told.addresses == (of_all if small_world == 3 else ())
    assert client.ask(FindAddresses(WORKERS[0], FENCE, (2, 0))).addresses == (of_all[2], of_all[0])
    driver.server.publish(world(2, WORKERS[1]))
    request = RequestNextWorld(
        WORKERS[1], FENCE, address="host-1:7000"
    )  # it may come before the world is there
    told = client.ask(request, hold=MAX_POLL_SECONDS)
    assert told.addresses == ("host-1:7000",)


def test_addresses_are_waited_for_and_those_of_new_processes_follow(driver: Driver) -> None:
    _ask_for_worlds(driver)
    client, other = driver.client(), driver.client()
    # Another process will have this worker's name.
    assert client.ask(RequestNextWorld(WORKERS[2], address=""), hold=0.0).is_undecided
    driver.server.publish(world(1, *WORKERS))
    assert client.ask(RequestNextWorld(WORKERS[0], address="host-0:7000"), hold=1.0).addresses == ()
    request = FindAddresses(WORKERS[0], FENCE, (1, 2))
    assert client.ask(request, hold=0.0).addresses == ("host-1:7000", "")
    waiting = driver.call_in_thread(lambda: client.ask(request, hold=MAX_POLL_SECONDS))
    driver.until_polls(1)
    told = other.ask(RequestNextWorld(WORKERS[2], address="host-2:7001"), hold=MAX_POLL_SECONDS)
    assert told.world is not None
    assert waiting.result(PATIENCE).addresses == ("host-1:7000", "host-2:7001")


def test_addresses_are_for_members_of_a_world_that_lives(driver: Driver) -> None:
    _ask_for_worlds(driver)
    driver.server.publish(world(1, *WORKERS))
    client = driver.client()
    with pytest.raises(StaleGeneration, match=r"9-0\.1 is no member"):
        client.ask(FindAddresses("9-0.1", FENCE, (0,)))
    with pytest.raises(InvalidInput, match=r"ranks must be in \[0, 3\)"):
        client.ask(FindAddresses(WORKERS[0], FENCE, (3,)))
    driver.server.abort(FENCE, "3-0.1 was lost")
    with pytest.raises(StaleGeneration, match=r"3-0\.1 was lost"):
        client.ask(FindAddresses(WORKERS[0], FENCE, (0,)))
    driver.server.publish(world(2, *WORKERS[:2], reason="3-0.1 was lost"))
    with pytest.raises(StaleGeneration, match=r"followed by 2: 3-0\.1 was lost"):
        client.ask(FindAddresses(WORKERS[0], FENCE, (0,)))


def test_values_are_set_read_and_waited_for(driver: Driver) -> None:
    client = driver.client()
    client.ask(SetValues("tuning", ("a",), (b"1",)))
    assert client.ask(GetValues("tuning", ("a", "b"))).values == (b"1", None)
    assert client.ask(GetValues("nothing", ("a",))).values == (None,)
    waiting = driver.call_in_thread(lambda: client.ask(GetValues("tuning", ("b", "a"), wait=True), PATIENCE))
    client.ask(SetValues("tuning", ("b",), (b"2",)))
    assert waiting.result(PATIENCE).values == (b"2", b"1")


def test_a_generations_scope_ends_with_it(driver: Driver) -> None:
    client = driver.client()
    driver.server.publish(world(1, *WORKERS))
    client.ask(SetValues("generation/1", ("a",), (b"1",)))
    driver.server.publish(world(2, *WORKERS))
    with pytest.raises(StaleGeneration):
        client.ask(GetValues("generation/1", ("a",)))
    with pytest.raises(StaleGeneration):
        client.ask(SetValues("generation/1", ("a",), (b"1",)))
