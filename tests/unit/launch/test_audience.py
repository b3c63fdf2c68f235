"""What workers print goes to the narrator; what their slots have to say is a warning, whatever is shown."""

from __future__ import annotations

import pytest

from spark_elastic.driver.stall_watch import StallWatch
from spark_elastic.launch.audience import Audience
from spark_elastic.launch.narrators import Silent
from spark_elastic.rendezvous.messages import OWN_WORDS, LogLines
from spark_elastic.testing.clock import FakeClock


class Listener(Silent):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def log(self, rank: int | None, line: str) -> None:
        self.heard.append(line)


def test_a_slot_s_own_words_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock, listener = FakeClock(), Listener()
    stalls = StallWatch(lambda event: None, clock, 3.0, lambda slots: 1.0)
    audience = Audience(listener, clock, 0.0, stalls)
    audience.lines(LogLines("1-0", "1-0.1", None, ("hello", f"{OWN_WORDS}memory will not do", "bye")))
    assert listener.heard == ["hello", "bye"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == "memory will not do (slot 1-0)"


def test_r17_whoever_shares_the_cluster_learns_that_a_world_is_over() -> None:
    clock, heard = FakeClock(), list[str]()
    stalls = StallWatch(lambda event: None, clock, 3.0, lambda slots: 1.0)
    audience = Audience(Silent(), clock, 0.0, stalls, parted=lambda: heard.append("parted"))
    audience.over("world 1 is over: executor lost")
    assert heard == ["parted"]
