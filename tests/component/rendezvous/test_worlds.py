"""Joining worlds, hearing that they are over, and reporting from them."""

from __future__ import annotations

import math

import pytest

from spark_elastic.errors import StaleGeneration
from spark_elastic.protocol import events
from spark_elastic.protocol.types import Fence, Phase, Position
from spark_elastic.rendezvous.messages import News, NextWorld
from tests.component.rendezvous.driver_side import ATTEMPT, PATIENCE, Driver, world

A, B, C = "1-0.1", "2-0.1", "3-0.1"
HERE = Position(1, Phase.VALIDATE, 5)


def test_a_join_waits_for_its_world(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    left = Fence(ATTEMPT, 1)
    waiting = driver.aside(lambda: worker.join(left, HERE, (B,), "connection reset", planned=False))
    joins = driver.heard(events.WorkerJoins)
    expected = events.WorkerJoins(joins.now, A, "1-0", left, HERE, (B,), "connection reset", False)
    assert joins == expected
    assert not waiting.done()
    new = world(2, A, C, positions=(HERE, None))
    driver.server.publish(new)
    assert waiting.result(PATIENCE) == NextWorld(new)


def test_one_who_is_no_member_keeps_waiting(driver: Driver) -> None:
    worker = driver.client().worker(C, "3-0")
    driver.server.publish(world(1, A, B))
    answer = worker.join(None, None, hold=0.1)
    assert answer.wait
    driver.server.publish(world(2, A, B, C))
    answer = worker.join(None, None)
    assert answer.world is not None
    assert answer.world.fence.generation == 2


def test_a_repeated_join_is_answered_without_a_second_event(driver: Driver) -> None:
    """The reply may have been lost on the way."""
    worker = driver.client().worker(A, "1-0")
    new = world(1, A)
    waiting = driver.aside(lambda: worker.join(None, None))
    driver.heard(events.WorkerJoins)
    driver.server.publish(new)
    assert waiting.result(PATIENCE).world == new
    assert worker.join(None, None).world == new
    assert driver.events.empty()


def test_a_world_that_was_left_is_not_handed_out(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    driver.server.publish(world(1, A))
    assert worker.join(Fence(ATTEMPT, 1), None, hold=0.05).wait


def test_a_watch_hears_of_the_version(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    driver.server.publish(world(1, A))
    assert worker.watch(None, 0, hold=0.05) == News(0)
    waiting = driver.aside(lambda: worker.watch(None, 0))
    driver.server.announce(1, "3-0.1 is warm")
    assert waiting.result(PATIENCE) == News(1, "3-0.1 is warm")
    # Level-triggered: one that has not heard hears at once.
    assert worker.watch(None, 0) == News(1, "3-0.1 is warm")
    assert worker.watch(None, 1, hold=0.05) == News(1, "3-0.1 is warm")


def test_a_watch_hears_of_an_abort_once(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    driver.server.publish(world(4, A, B))
    waiting = driver.aside(lambda: worker.watch(None, 0))
    driver.server.abort(Fence(ATTEMPT, 3), "an older one")
    driver.server.abort(Fence(ATTEMPT, 4), "2-0.1 was lost")
    news = waiting.result(PATIENCE)
    assert (news.over, news.why) == (Fence(ATTEMPT, 4), "2-0.1 was lost")
    # Asked by what was heard last: it waits for the next one, and hears again after a lost reply.
    waiting = driver.aside(lambda: worker.watch(news.over, 0))
    assert worker.watch(None, 0) == news
    driver.until_polls(1)
    assert not waiting.done()
    driver.server.announce(1, "3-0.1 is warm")
    assert waiting.result(PATIENCE).version == 1


def test_a_watch_hears_that_its_world_was_followed(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    driver.server.publish(world(1, A, B))
    waiting = driver.aside(lambda: worker.watch(None, 0))
    driver.server.publish(world(2, B, reason="1-0.1 was silent"))
    news = waiting.result(PATIENCE)
    assert (news.over, news.why) == (Fence(ATTEMPT, 1), "1-0.1 was silent")


def test_progress_is_handed_on(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    worker.report({"loss": 0.5, "step": 3})
    report = driver.reports.get(timeout=PATIENCE)
    assert (report.worker, report.numbers) == (A, {"loss": 0.5, "step": 3})


def test_progress_of_a_training_that_diverged_is_handed_on_too(driver: Driver) -> None:
    """JSON has no NaN: the server refused every such report, and people saw a job that stood still."""
    driver.client().worker(A, "1-0").report({"loss": math.nan, "norm": -math.inf, "step": 3})
    numbers = driver.reports.get(timeout=PATIENCE).numbers
    assert math.isnan(numbers.pop("loss"))
    assert numbers == {"norm": -math.inf, "step": 3}


def test_a_stop_reaches_join_watch_and_later_requests(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    joining = driver.aside(lambda: worker.join(None, None))
    watching = driver.aside(lambda: worker.watch(None, 0))
    driver.heard(events.WorkerJoins)
    driver.server.stop_worker(A, "its slot is drained")
    assert joining.result(PATIENCE) == NextWorld(stop="its slot is drained")
    assert watching.result(PATIENCE).stop == "its slot is drained"
    assert worker.join(None, None).stop == "its slot is drained"
    other = driver.client().worker(B, "2-0")
    assert other.join(None, None, hold=0.05).wait


def test_r15_done_waits_for_the_acknowledgement_or_another_world(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    driver.server.publish(world(1, A, B))
    fence = Fence(ATTEMPT, 1)
    waiting = driver.aside(lambda: worker.done(fence, HERE, '{"loss": 1}'))
    done = driver.heard(events.WorkerDone)
    assert (done.worker, done.fence, done.position, done.result) == (A, fence, HERE, '{"loss": 1}')
    again = world(2, A)
    driver.server.publish(again)
    assert waiting.result(PATIENCE) == NextWorld(again)
    waiting = driver.aside(lambda: worker.done(again.fence, HERE, "{}"))
    driver.heard(events.WorkerDone)
    driver.server.stop_worker(A, "the model is safe")
    assert waiting.result(PATIENCE).stop == "the model is safe"


def test_formed_and_failed_are_events(driver: Driver) -> None:
    worker = driver.client().worker(A, "1-0")
    driver.server.publish(world(1, A))
    fence = Fence(ATTEMPT, 1)
    worker.formed(fence)
    assert driver.heard(events.WorkerFormed).fence == fence
    worker.failed(fence, HERE, "ValueError@loss:3", "Traceback …")
    failed = driver.heard(events.WorkerFailed)
    assert (failed.worker, failed.fence, failed.position) == (A, fence, HERE)
    assert (failed.fingerprint, failed.traceback) == ("ValueError@loss:3", "Traceback …")


def test_r10_another_attempt_and_an_older_generation_are_stale(driver: Driver) -> None:
    driver.server.publish(world(2, A))
    old = driver.client(attempt=ATTEMPT - 1).worker(A, "1-0")
    with pytest.raises(StaleGeneration, match=f"attempt {ATTEMPT}"):
        old.join(None, None)
    worker = driver.client().worker(A, "1-0")
    with pytest.raises(StaleGeneration, match="followed by 2"):
        worker.formed(Fence(ATTEMPT, 1))
    with pytest.raises(StaleGeneration, match="not known"):
        worker.formed(Fence(ATTEMPT, 3))
    assert driver.events.empty()
