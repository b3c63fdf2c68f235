"""Joining worlds, hearing that they are over, and reporting from them."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import Future
from functools import partial

import pytest

from spark_elastic.errors import StaleGeneration
from spark_elastic.protocol.messages import (
    DriverRequest,
    NextWorld,
    RequestNextWorld,
    WorkerDone,
    WorldFormed,
)
from spark_elastic.protocol.types import INITIAL_VERSION, Fence, Phase, Position, WorkerId
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.codec import encode_numbers
from spark_elastic.rendezvous.http_server import ConnectionLimits
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, Report, WatchWorker, WorkerUpdate
from tests.component.rendezvous.driver_side import ATTEMPT, PATIENCE, Driver, R, world

A, B, C = WorkerId("1-0.1"), WorkerId("2-0.1"), WorkerId("3-0.1")
HERE = Position(1, Phase.VALIDATE, 5)


def hold(driver: Driver, client: RendezvousClient, request: DriverRequest[R]) -> Future[R]:
    return driver.call_in_thread(lambda: client.ask(request, hold=MAX_POLL_SECONDS))


def test_a_join_waits_for_its_world(driver: Driver) -> None:
    client = driver.client()
    driver.server.publish(world(1, A, B))
    request = RequestNextWorld(A, Fence(ATTEMPT, 1), HERE, reason="connection reset", suspected_ranks=(1, 2))
    waiting = hold(driver, client, request)
    # The driver knows its suspects by name.
    assert driver.await_event(RequestNextWorld) == dataclasses.replace(request, suspects=(B,))
    assert not waiting.done()
    new = world(2, A, C, positions=(HERE, None))
    driver.server.publish(new)
    assert waiting.result(PATIENCE) == NextWorld(new.view_of(A))


def test_a_worker_that_is_no_member_of_the_new_world_keeps_waiting(driver: Driver) -> None:
    worker = driver.client()
    driver.server.publish(world(1, A, B))
    answer = worker.ask(RequestNextWorld(C), hold=0.1)
    assert answer.is_undecided
    driver.server.publish(world(2, A, B, C))
    answer = worker.ask(RequestNextWorld(C), hold=MAX_POLL_SECONDS)
    assert answer.world is not None
    assert answer.world.fence.generation == 2


def test_a_repeated_join_is_answered_without_a_second_event(driver: Driver) -> None:
    """The reply may have been lost on the way."""
    worker = driver.client()
    new = world(1, A)
    waiting = hold(driver, worker, RequestNextWorld(A))
    driver.await_event(RequestNextWorld)
    driver.server.publish(new)
    assert waiting.result(PATIENCE).world == new.view_of(A)
    assert worker.ask(RequestNextWorld(A), hold=MAX_POLL_SECONDS).world == new.view_of(A)
    assert driver.events.empty()


def test_a_join_is_not_answered_with_the_world_that_the_worker_left(driver: Driver) -> None:
    worker = driver.client()
    driver.server.publish(world(1, A))
    assert worker.ask(RequestNextWorld(A, Fence(ATTEMPT, 1), None), hold=0.05).is_undecided


def test_a_watch_returns_a_new_membership_version(driver: Driver) -> None:
    worker = driver.client()
    driver.server.publish(world(1, A))
    assert worker.ask(WatchWorker(A), hold=0.05) == WorkerUpdate(INITIAL_VERSION)
    waiting = hold(driver, worker, WatchWorker(A))
    newer = INITIAL_VERSION.next()
    news = WorkerUpdate(newer)
    driver.server.announce(newer)
    assert waiting.result(PATIENCE) == news
    # Level-triggered: one that has not heard hears at once.
    assert worker.ask(WatchWorker(A), hold=MAX_POLL_SECONDS) == news
    assert worker.ask(WatchWorker(A, None, newer), hold=0.05) == news


def test_polls_that_wait_are_no_unauthenticated_connections(driver: Driver) -> None:
    """A job of a thousand workers has more of them than there may be strangers."""

    def admit_three() -> None:
        connections = driver.server._http_server._connections  # type: ignore[union-attr]
        connections.limits = ConnectionLimits(unauthenticated=3)  # type: ignore[union-attr]

    driver.call_in_loop(admit_three)
    asks = [partial(driver.client().ask, WatchWorker(f"{n}-0.1"), hold=MAX_POLL_SECONDS) for n in range(6)]
    waiting = []
    for number, ask in enumerate(asks, start=1):
        waiting.append(driver.call_in_thread(ask))
        driver.until_polls(number)
    driver.server.announce(INITIAL_VERSION.next())
    assert all(poll.result(PATIENCE).version == INITIAL_VERSION.next() for poll in waiting)
    assert driver.events.empty()  # none was lost


def test_a_watch_returns_an_abort_once(driver: Driver) -> None:
    worker = driver.client()
    driver.server.publish(world(4, A, B))
    waiting = hold(driver, worker, WatchWorker(A))
    driver.server.abort(Fence(ATTEMPT, 3), "an older one")
    driver.server.abort(Fence(ATTEMPT, 4), "2-0.1 was lost")
    news = waiting.result(PATIENCE)
    assert (news.ended_fence, news.end_reason) == (Fence(ATTEMPT, 4), "2-0.1 was lost")
    # Asked by what was heard last: it waits for the next one, and hears again after a lost reply.
    waiting = hold(driver, worker, WatchWorker(A, news.ended_fence))
    assert worker.ask(WatchWorker(A), hold=MAX_POLL_SECONDS) == news
    driver.until_polls(1)
    assert not waiting.done()
    driver.server.announce(INITIAL_VERSION.next())
    assert waiting.result(PATIENCE).version == INITIAL_VERSION.next()


def test_a_watch_of_an_older_world_returns_the_next_one(driver: Driver) -> None:
    worker = driver.client()
    driver.server.publish(world(1, A, B))
    waiting = hold(driver, worker, WatchWorker(A))
    driver.server.publish(world(2, B, reason="1-0.1 was silent"))
    news = waiting.result(PATIENCE)
    assert (news.ended_fence, news.end_reason) == (Fence(ATTEMPT, 1), "1-0.1 was silent")


def test_a_planned_change_wakes_no_watch_of_those_who_are_in_the_next_world(driver: Driver) -> None:
    driver.server.publish(world(1, A, B))
    member, left_out = (hold(driver, driver.client(), WatchWorker(worker)) for worker in (A, B))
    driver.until_polls(2)
    driver.server.publish(world(2, A))
    assert left_out.result(PATIENCE).ended_fence == Fence(ATTEMPT, 1)
    assert driver.client().ask(RequestNextWorld(A), hold=MAX_POLL_SECONDS).world is not None
    assert not member.done()
    driver.server.abort(Fence(ATTEMPT, 2), "why")
    assert member.result(PATIENCE).ended_fence == Fence(ATTEMPT, 2)


def test_progress_with_nan_and_infinity_becomes_an_event(driver: Driver) -> None:
    """JSON has no NaN: the server refused every such report, and people saw a job that stood still."""
    driver.client().ask(Report(A, encode_numbers({"loss": math.nan, "norm": -math.inf, "step": 3})))
    report = driver.reports.get(timeout=PATIENCE)
    numbers = report.numbers
    assert report.worker == A
    assert math.isnan(numbers.pop("loss"))
    assert numbers == {"norm": -math.inf, "step": 3}


def test_a_stop_reaches_join_watch_and_later_requests(driver: Driver) -> None:
    worker = driver.client()
    joining = hold(driver, worker, RequestNextWorld(A))
    watching = hold(driver, worker, WatchWorker(A))
    driver.await_event(RequestNextWorld)
    driver.server.stop_worker(A, "its slot is drained")
    assert joining.result(PATIENCE) == NextWorld(stop="its slot is drained")
    assert watching.result(PATIENCE).stop == "its slot is drained"
    assert worker.ask(RequestNextWorld(A), hold=MAX_POLL_SECONDS).stop == "its slot is drained"
    other = driver.client()
    assert other.ask(RequestNextWorld(B), hold=0.05).is_undecided


def test_r15_done_waits_for_the_acknowledgement_or_another_world(driver: Driver) -> None:
    worker = driver.client()
    driver.server.publish(world(1, A, B))
    fence = Fence(ATTEMPT, 1)
    waiting = hold(driver, worker, WorkerDone(A, fence, HERE, '{"loss": 1}'))
    done = driver.await_event(WorkerDone)
    assert (done.worker, done.fence, done.position, done.result) == (A, fence, HERE, '{"loss": 1}')
    again = world(2, A)
    driver.server.publish(again)
    assert waiting.result(PATIENCE) == NextWorld(again.view_of(A))
    waiting = hold(driver, worker, WorkerDone(A, again.fence, HERE, "{}"))
    driver.await_event(WorkerDone)
    driver.server.stop_worker(A, "the model is safe")
    assert waiting.result(PATIENCE).stop == "the model is safe"


def test_r10_another_attempt_and_an_older_generation_are_stale(driver: Driver) -> None:
    driver.server.publish(world(2, A))
    old = driver.client(attempt=ATTEMPT - 1)
    with pytest.raises(StaleGeneration, match=f"attempt {ATTEMPT}"):
        old.ask(RequestNextWorld(A), hold=MAX_POLL_SECONDS)
    worker = driver.client()
    with pytest.raises(StaleGeneration, match="followed by 2"):
        worker.ask(WorldFormed(A, Fence(ATTEMPT, 1)))
    with pytest.raises(StaleGeneration, match="not known"):
        worker.ask(WorldFormed(A, Fence(ATTEMPT, 3)))
    assert driver.events.empty()
