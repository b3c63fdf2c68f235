"""What a slot task says and is told."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.errors import StaleGeneration
from spark_elastic.protocol.messages import Admission, Heartbeat, RegisterSlot, WorkerStarted
from spark_elastic.protocol.types import WorkerId
from spark_elastic.rendezvous.client import TransportError
from spark_elastic.rendezvous.messages import (
    MAX_POLL_SECONDS,
    LogLines,
    SlotCommands,
    WatchSlot,
    WorkerToStop,
)
from tests.component.rendezvous.driver_side import ATTEMPT, BEAT_EVERY, PATIENCE, Driver, start_driver


def test_r14_an_unfit_slot_is_refused_and_the_driver_gets_the_reason() -> None:
    sentence = "host-b runs torch 1.0 and the driver 2.0: install one version."
    driver = start_driver(admit=lambda facts: sentence if facts["torch"] == "1.0" else None)
    try:
        slot = driver.client()
        answer = slot.ask(RegisterSlot("1-0", "host-b", 1, facts={"torch": "1.0"}))
        assert answer == Admission(False, sentence, BEAT_EVERY)
        assert driver.await_event(RegisterSlot).unfit == sentence
        assert slot.ask(RegisterSlot("1-0", "host-b", 1, facts={"torch": "2.0"})).accepted
        assert driver.await_event(RegisterSlot).unfit == ""
    finally:
        driver.close()


def test_commands_of_a_slot_are_delivered_at_once_and_only_once(driver: Driver) -> None:
    slot = driver.client()
    slot.ask(WorkerStarted("1-0", "1-0.1"))
    waiting = driver.call_in_thread(lambda: slot.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS))
    driver.server.stop_worker(WorkerId("1-0.1"), "it hangs", kill=True)
    first = waiting.result(PATIENCE)
    assert first == SlotCommands(1, (WorkerToStop("1-0.1", "it hangs", True),))
    assert slot.ask(WatchSlot("2-0", 0), hold=0.05) == SlotCommands(0), "of another slot"
    # A reply that was lost is asked for again, and repeated.
    assert slot.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS) == first
    assert slot.ask(WatchSlot("1-0", first.seen), hold=0.0) == SlotCommands(1)
    waiting = driver.call_in_thread(lambda: slot.ask(WatchSlot("1-0", first.seen), hold=MAX_POLL_SECONDS))
    driver.server.release_slot("1-0", "below min_workers")
    assert waiting.result(PATIENCE) == SlotCommands(1, (), "below min_workers")


def test_log_lines_arrive_in_order_with_their_rank(driver: Driver) -> None:
    slot = driver.client()
    slot.ask(LogLines("1-0", "1-0.1", None, ("importing",)))
    slot.ask(LogLines("1-0", "1-0.1", 2, ("epoch 1 – déjà", "epoch 2")))
    first, second = driver.logs.get(timeout=PATIENCE), driver.logs.get(timeout=PATIENCE)
    assert (first.rank, first.lines) == (None, ("importing",))
    assert (second.worker, second.rank, second.lines) == ("1-0.1", 2, ("epoch 1 – déjà", "epoch 2"))


def test_after_the_end_of_the_job_every_request_is_answered_with_stop(driver: Driver) -> None:
    slot = driver.client()
    waiting = driver.call_in_thread(lambda: slot.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS))
    driver.server.end("the job is done")
    assert waiting.result(PATIENCE).release == "the job is done"
    assert slot.ask(WatchSlot("1-0"), hold=MAX_POLL_SECONDS).release == "the job is done"
    answer = slot.ask(RegisterSlot("1-0", "host-a", 1, facts={}))
    assert answer == Admission(False, "the job is done", BEAT_EVERY)


def test_r12_a_request_without_answer_is_sent_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    client = driver.client()
    client.ask(Heartbeat("1-0"))
    limits, post = [], client._post

    def swallow(path: str, body: bytes, seconds: float) -> dict[str, Any]:
        limits.append(seconds)
        if len(limits) < 4:
            raise TransportError("timed out")
        return post(path, body, seconds)

    monkeypatch.setattr(client, "_post", swallow)
    client.ask(Heartbeat("1-0"), patience=0.5)
    assert limits == pytest.approx([0.5, 1.0, 2.0, 4.0])


def test_r18_an_answer_counts_from_the_time_of_its_request(driver: Driver) -> None:
    client, clock = driver.client(), SystemClock()
    before = clock.now()
    client.ask(WatchSlot("1-0"), hold=0.5)
    assert before <= client.last_answered_at() < clock.now() - 0.4
    client.ask(Heartbeat("1-0"))
    assert client.last_answered_at() > before + 0.4


def test_r18_an_answer_of_another_attempts_driver_does_not_count(driver: Driver) -> None:
    client = driver.client(attempt=ATTEMPT + 1)
    with pytest.raises(StaleGeneration):
        client.ask(Heartbeat("1-0"))
    assert client.last_answered_at() == float("-inf")
