"""What a slot task says and is told."""

from __future__ import annotations

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.errors import StaleGeneration
from spark_elastic.protocol import events
from spark_elastic.rendezvous.messages import Acknowledged, Admission, Pace, SlotOrders, WorkerStop
from tests.component.rendezvous.driver_side import ATTEMPT, BEAT_EVERY, PATIENCE, Driver, start_driver


def test_each_message_becomes_its_event(driver: Driver) -> None:
    slot = driver.client().slot("3-0")
    assert slot.register("host-a", 3, {"python": "3.11", "pid": 1}) == Admission(True, beat_every=BEAT_EVERY)
    assert slot.started("3-0.1") == Acknowledged()
    assert slot.beat("3-0.1", "R") == Pace(BEAT_EVERY)
    assert slot.exited("3-0.1", -9, "killed") == Acknowledged()
    registered = driver.heard(events.SlotRegistered)
    assert (registered.slot, registered.host, registered.launch) == ("3-0", "host-a", 3)
    started = driver.heard(events.WorkerStarted)
    assert (started.slot, started.worker) == ("3-0", "3-0.1")
    beat = driver.heard(events.SlotBeat)
    assert (beat.slot, beat.worker, beat.state) == ("3-0", "3-0.1", "R")
    exited = driver.heard(events.WorkerExited)
    assert (exited.worker, exited.exit_code, exited.reason) == ("3-0.1", -9, "killed")
    assert registered.now <= started.now <= beat.now <= exited.now


def test_r14_a_slot_with_wrong_facts_is_refused_and_the_driver_hears_why() -> None:
    sentence = "host-b runs torch 1.0 and the driver 2.0: install one version."
    driver = start_driver(admit=lambda facts: sentence if facts["torch"] == "1.0" else None)
    try:
        slot = driver.client().slot("1-0")
        assert slot.register("host-b", 1, {"torch": "1.0"}) == Admission(False, sentence, BEAT_EVERY)
        assert driver.heard(events.SlotRegistered).unfit == sentence
        assert slot.register("host-b", 1, {"torch": "2.0"}).accepted
        assert driver.heard(events.SlotRegistered).unfit == ""
    finally:
        driver.close()


def test_orders_come_at_once_and_only_once(driver: Driver) -> None:
    slot = driver.client().slot("1-0")
    slot.started("1-0.1")
    waiting = driver.aside(lambda: slot.watch(0))
    driver.server.stop_worker("1-0.1", "it hangs", kill=True)
    first = waiting.result(PATIENCE)
    assert first == SlotOrders(1, (WorkerStop("1-0.1", "it hangs", True),))
    # A reply that was lost is asked for again, and repeated.
    assert slot.watch(0) == first
    assert slot.watch(first.seen, hold=0.0) == SlotOrders(1)
    waiting = driver.aside(lambda: slot.watch(first.seen))
    driver.server.release_slot("1-0", "below min_workers")
    assert waiting.result(PATIENCE) == SlotOrders(1, (), "below min_workers")


def test_orders_of_one_slot_do_not_reach_another(driver: Driver) -> None:
    other = driver.client().slot("2-0")
    driver.server.stop_worker("1-0.1", "gone")
    assert other.watch(0, hold=0.05) == SlotOrders(0)


def test_log_lines_arrive_in_order_with_their_rank(driver: Driver) -> None:
    slot = driver.client().slot("1-0")
    slot.logs("1-0.1", None, ("importing",))
    slot.logs("1-0.1", 2, ("epoch 1 – déjà", "epoch 2"))
    first, second = driver.logs.get(timeout=PATIENCE), driver.logs.get(timeout=PATIENCE)
    assert (first.rank, first.lines) == (None, ("importing",))
    assert (second.worker, second.rank, second.lines) == ("1-0.1", 2, ("epoch 1 – déjà", "epoch 2"))


def test_after_the_end_everyone_is_told_to_stop(driver: Driver) -> None:
    slot = driver.client().slot("1-0")
    waiting = driver.aside(lambda: slot.watch(0))
    driver.server.end("the job is done")
    assert waiting.result(PATIENCE).release == "the job is done"
    assert slot.watch(0).release == "the job is done"
    assert slot.beat().stop == "the job is done"
    assert slot.register("host-a", 1, {}) == Admission(False, "the job is done", BEAT_EVERY)


def test_r18_what_the_driver_surely_heard_is_the_question_not_its_late_answer(driver: Driver) -> None:
    client, clock = driver.client(), SystemClock()
    before = clock.now()
    client.slot("1-0").watch(0, hold=0.5)
    assert before <= client.heard_at() < clock.now() - 0.4
    client.slot("1-0").beat()
    assert client.heard_at() > before + 0.4


def test_r18_another_attempts_driver_is_not_the_one_that_hears(driver: Driver) -> None:
    client = driver.client(attempt=ATTEMPT + 1)
    with pytest.raises(StaleGeneration):
        client.slot("1-0").beat()
    assert client.heard_at() == float("-inf")
