"""A job whose coordinator speaks to its client by letters alone, over real processes of this machine."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.coordinator import CLIENT, COORDINATOR, Client, Coordinator
from spark_elastic.data.store import Store
from spark_elastic.driver.discovery import Together
from spark_elastic.errors import CoordinatorLost
from spark_elastic.launch import LaunchResult, Silent
from spark_elastic.protocol.types import Limits
from spark_elastic.state.mail import Box
from spark_elastic.testing import CountingProgram, ProcessLauncher

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

KEY = b"k" * 32


class Watcher(Silent):
    """at: a step, at which `strike` is called once, in another thread."""

    def __init__(self, at: int, strike: Any) -> None:
        self.at, self.strike, self.sizes = at, strike, []

    def progress(self, numbers: Any) -> None:
        if numbers["step"] >= self.at and self.strike is not None:
            threading.Thread(target=self.strike, name="strike").start()
            self.strike = None

    def world(self, size: int, reason: str) -> None:
        self.sizes.append(size)


def follow(
    folder: Path, launcher: ProcessLauncher, narrate: Silent, lost: threading.Event | None = None
) -> LaunchResult:
    """lost: when set, the coordinator's task is reported as lost, and says nothing more."""
    store = Store.open(str(folder))
    task = Coordinator(
        Box(store, "mail/1", KEY, COORDINATOR, CLIENT),
        Limits(2, 1, 2, gather_timeout=60.0),
        ElasticConfig(status_page=False, driver_timeout=10.0),
        "test",
        encrypted=False,
        admit=lambda facts: None,
        run=None,
    )
    client = Client(
        Box(store, "mail/1", KEY, CLIENT, COORDINATOR), "test", launcher, Together(), narrate, SystemClock()
    )
    conducting = threading.Thread(target=task.conduct, args=("127.0.0.1",), name="conducting")

    def carry() -> str:
        conducting.start()
        while conducting.is_alive() and not (lost is not None and lost.is_set()):
            conducting.join(0.05)
        return "executor 3 was lost" if conducting.is_alive() else "it has ended"

    try:
        return client.follow(carry, 1, 60.0)
    finally:
        conducting.join(60)


def test_a_job_by_mail_lives_through_the_loss_of_a_slot(tmp_path: Path) -> None:
    program = CountingProgram(steps=60, seconds=0.03)
    cluster = ProcessLauncher(program, SystemClock(), room=3)
    watcher = Watcher(10, lambda: cluster.kill(max(cluster.slots())))
    result = follow(tmp_path, cluster, watcher)
    assert {json.loads(text)["sum"] for text in result.results if text != "null"} == {program.expected()}
    assert [world.size for world in result.worlds] == watcher.sizes
    assert watcher.sizes[0] == 2
    assert len(watcher.sizes) >= 2
    assert result.report.recoveries
    assert Store.open(str(tmp_path)).list("mail/1") == []


@pytest.mark.faults  # until it takes its client for gone, ten seconds
def test_a_coordinator_that_is_lost_is_named(tmp_path: Path) -> None:
    program = CountingProgram(steps=200, seconds=0.02)
    cluster = ProcessLauncher(program, SystemClock(), room=2)
    lost = threading.Event()
    with pytest.raises(CoordinatorLost, match="which ran in a task, was lost: executor 3"):
        follow(tmp_path, cluster, Watcher(5, lost.set), lost)
