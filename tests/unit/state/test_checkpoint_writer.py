"""How long the end of a training waits for its last checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from spark_elastic.errors import StoreError
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.runs import checkpoint as checkpoint_writer
from spark_elastic.runs.checkpoint import CheckpointStore, CheckpointWriter
from tests.full_process import refuse_next_thread
from tests.patience import until

FENCE, POSITION = Fence(1, 1), Position(0, Phase.TRAIN, 7)


class SlowStore:
    """Answers when it is told to, and fails as often as told."""

    def __init__(self, failures: int = 0) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.failures = failures

    def write(self, fence: Fence, position: Position, parts: Mapping[str, bytes]) -> Checkpoint:
        self.asked.set()
        assert self.answers.wait(45)
        if self.failures:
            self.failures -= 1
            raise StoreError("no answer")
        return Checkpoint(fence, position, "name", "digest")


def start_writer(store: SlowStore, told: list[Checkpoint]) -> CheckpointWriter:
    writer = CheckpointWriter(cast("CheckpointStore", store), told.append)
    writer.offer(FENCE, POSITION, dict)
    return writer


def test_p7_the_writer_waits_for_a_slow_store_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_writer, "WARN_INTERVAL", 0.02)
    store, told = SlowStore(), list[Checkpoint]()
    writer = start_writer(store, told)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        flushing = pool.submit(writer.flush)
        try:
            assert until(lambda: "still being written, after 0.06 s" in caplog.text)
            assert not flushing.done()
        finally:
            store.answers.set()
        flushing.result(45)
    assert [checkpoint.position for checkpoint in told] == [POSITION]
    writer.close()


def test_a_store_that_never_answers_ends_the_wait_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_writer, "WARN_INTERVAL", 0.02)
    monkeypatch.setattr(checkpoint_writer, "FLUSH_TIMEOUT", 0.04)
    store, told = SlowStore(), list[Checkpoint]()
    writer = start_writer(store, told)
    writer.flush()
    assert "given up: the store does not answer" in caplog.text
    assert not told
    store.answers.set()
    writer.close()


@pytest.mark.parametrize(("failures", "told"), [(1, [POSITION]), (2, [])])
def test_p7_a_checkpoint_that_fails_after_it_was_offered_again_is_written_again(
    failures: int, told: list[Position]
) -> None:
    """As the last commit of a job, which nothing offers a third time."""
    store, written = SlowStore(failures), list[Checkpoint]()
    writer = start_writer(store, written)
    assert store.asked.wait(45)
    writer.offer(FENCE, POSITION, dict)
    store.answers.set()
    writer.flush()
    assert [checkpoint.position for checkpoint in written] == told
    writer.close()


def test_p7_a_writer_whose_thread_cannot_start_writes_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_next_thread(monkeypatch)
    store, told = SlowStore(), list[Checkpoint]()
    writer = start_writer(store, told)
    assert "checkpoint not written: can't start new thread" in caplog.text
    store.answers.set()
    writer.flush()
    assert not told
    writer.offer(FENCE, POSITION, dict)
    writer.flush()
    assert len(told) == 1
    writer.close()
