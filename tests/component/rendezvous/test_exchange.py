"""The exchange of addresses, and the key-value store under it."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from spark_elastic.errors import InvalidInput, PeersMissing, StaleGeneration
from spark_elastic.protocol.types import Fence
from spark_elastic.rendezvous.client import exchange_blobs
from spark_elastic.rendezvous.messages import ExchangeAddresses, GetValues, SetValues
from tests.component.rendezvous.driver_side import ATTEMPT, PATIENCE, Driver, world

WORKERS = ("1-0.1", "2-0.1", "3-0.1")
FENCE = Fence(ATTEMPT, 1)


def _exchange(driver: Driver, rank: int, blob: bytes, name: str = "mesh") -> Future[tuple[bytes, ...]]:
    worker = driver.client()
    return driver.call_in_thread(
        lambda: exchange_blobs(worker, ExchangeAddresses(WORKERS[rank], FENCE, rank, blob, name), PATIENCE)
    )


def test_everyone_gets_all_blobs_in_rank_order(driver: Driver) -> None:
    driver.server.publish(world(1, *WORKERS))
    blobs = (bytes(range(256)), b"", b"\x00" * 1000)
    waiting = [_exchange(driver, rank, blobs[rank]) for rank in (2, 0, 1)]
    assert [future.result(PATIENCE) for future in waiting] == [blobs] * 3


def test_exchanges_of_one_world_have_names(driver: Driver) -> None:
    driver.server.publish(world(1, *WORKERS))
    waiting = [
        _exchange(driver, rank, f"{name}{rank}".encode(), name) for name in ("l", "x") for rank in range(3)
    ]
    got = [future.result(PATIENCE) for future in waiting]
    assert got == [(b"l0", b"l1", b"l2")] * 3 + [(b"x0", b"x1", b"x2")] * 3


def test_an_abort_ends_waiting_exchanges(driver: Driver) -> None:
    driver.server.publish(world(1, *WORKERS))
    waiting = [_exchange(driver, rank, b"a") for rank in (0, 1)]
    driver.server.abort(FENCE, "3-0.1 was lost")
    for future in waiting:
        with pytest.raises(StaleGeneration, match=r"3-0\.1 was lost"):
            future.result(PATIENCE)


def test_the_next_world_ends_exchanges_of_the_last_one(driver: Driver) -> None:
    driver.server.publish(world(1, *WORKERS))
    waiting = _exchange(driver, 0, b"a")
    driver.server.publish(world(2, *WORKERS[:2], reason="3-0.1 was lost"))
    with pytest.raises(StaleGeneration, match=r"followed by 2: 3-0\.1 was lost"):
        waiting.result(PATIENCE)


def test_a_timeout_of_an_exchange_names_the_missing_ranks(driver: Driver) -> None:
    driver.server.publish(world(1, *WORKERS))
    worker = driver.client()
    with pytest.raises(PeersMissing, match=r"no address came from 2-0\.1, 3-0\.1\."):
        exchange_blobs(worker, ExchangeAddresses(WORKERS[0], FENCE, 0, b"a"), 0.1)


def test_only_the_worker_of_a_rank_may_send_its_blob(driver: Driver) -> None:
    driver.server.publish(world(1, *WORKERS))
    other = driver.client()
    with pytest.raises(StaleGeneration, match="is not rank 0"):
        exchange_blobs(other, ExchangeAddresses("9-0.1", FENCE, 0, b"a"), 1.0)
    member = driver.client()
    with pytest.raises(StaleGeneration, match="is not rank 0"):
        exchange_blobs(member, ExchangeAddresses(WORKERS[1], FENCE, 0, b"a"), 1.0)


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


def test_a_value_beyond_the_bounds_is_refused_in_a_sentence(driver: Driver) -> None:
    client = driver.client()
    with pytest.raises(InvalidInput, match="bytes"):
        client.ask(SetValues("big", ("a",), (bytes((4 << 20) + 1),)))
    client.ask(SetValues("big", ("a",), (b"fits",)))
