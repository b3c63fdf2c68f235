"""P5: a rank that keeps the others waiting is named, with the state of its process and its Python stack."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import cloudpickle
import pytest

from spark_elastic.launch import LaunchResult
from spark_elastic.testing.counting import CountingProgram
from tests.component.worker import stuck
from tests.component.worker.losses import Job, sizes
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

cloudpickle.register_pickle_by_value(stuck)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if "has kept others waiting" in record.getMessage()
    ]


def entry(result: LaunchResult, text: str) -> str:
    """The first line of the story that contains `text`."""
    return next(line for line in result.story if text in line)


@pytest.mark.scenario("G4")
def test_p5_a_stopped_worker_is_named_with_its_last_stack_before_it_is_given_up(
    caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    job = Job(CountingProgram(200, 0.03))
    # Stopped long enough after its begin for a sample of its stack to be there.
    job.at_step(50, lambda: fault(job.workers()[1].send_signal, signal.SIGSTOP))
    result = job.run(lease=6.0)
    (sentence,) = named(caplog)
    assert "is stopped (T), last seen in " in sentence
    assert "run (" in sentence
    assert "testing/counting.py:" in sentence
    lost = entry(result, "is lost: its process has not run for")
    assert sentence in lost, "what it was doing is part of its story"
    assert sizes(result)[:2] == [3, 2]


@pytest.mark.parametrize(
    ("program", "place"), [(stuck.HoldsTheGil, "call_c_code"), (stuck.Dawdles, "dawdle")]
)
def test_p5_a_worker_that_is_stuck_is_named_with_where_it_is(
    program: Callable[..., CountingProgram], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In C code that keeps the interpreter's lock, too: a native thread reads the stack then."""
    job = Job(program(20, 0.03), size=2)
    result = job.run()
    (sentence,) = named(caplog)
    assert sentence.startswith("rank 1 (worker ")
    assert re.search(rf"last seen in (sleep \(\S+\) < )?{place} \(worker/stuck.py:", sentence)
    assert "WorkerStalled" in entry(result, "has kept others waiting")


def test_p5_the_error_of_a_wait_that_ends_says_who_was_missing_and_what_it_was_doing() -> None:
    """It holds the interpreter's lock for ever: its slot beats, but it never comes, and is given up in the end."""
    job = Job(stuck.NeverReturns(20, 0.03), size=2, collective_timeout=5.0)
    result = job.run(regroup_timeout=2.0)
    over = entry(result, "world 1 is over")
    assert "saw" in over
    assert "has kept others waiting for" in over
    assert "last seen in call_c_code (worker/stuck.py:" in over
    assert "last seen in call_c_code" in entry(result, "did not come to the regroup within 2 s")
