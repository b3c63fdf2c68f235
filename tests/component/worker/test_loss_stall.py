"""P5: a rank that keeps the others waiting is named, with the state of its process and its Python stack."""

from __future__ import annotations

import re
import signal

import pytest

from spark_elastic.config import ElasticConfig
from tests.component.worker.losses import Job, sizes
from tests.component.worker.moments import HeldProgram, NeverReturns
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]


def entry(job: Job, text: str) -> str:
    """The first line of the journal that contains `text`."""
    return next(line for line in job.journal if text in line)


@pytest.mark.scenario("G4")
def test_p5_r24_a_stopped_worker_is_evicted_soon_and_named_with_its_last_stack(fault: Fault) -> None:
    job = Job(HeldProgram(60, 0.03), until=lambda now: len(now.sizes) >= 2, faults=fault.on)
    # Stopped long enough after its begin for a sample of its stack to be there.
    job.act_at_step(45, lambda: fault(job.workers()[1].send_signal, signal.SIGSTOP))
    result = job.run(lease=10.0)
    lost = entry(job, "is lost: its process has not run for")
    seen = re.search(r"run for ([\d.]+) s, last seen in .*run \((testing/|worker/moments)", lost)
    assert seen, lost
    assert float(seen[1]) < 5.0, "R24: others wait for it"
    assert sizes(result)[0] == 3
    assert entry(job, "world 1 is over")


def test_p5_a_hanging_worker_and_its_stack_are_named_in_the_errors_of_its_peers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C code holds its interpreter's lock for ever: no thread of Python's could tell where it is; its slot still sends
    heartbeats."""
    slow_to_name = ElasticConfig(stall_after=4.0)  # its stack is known three seconds after it hangs
    job = Job(NeverReturns(20, 0.03), size=2, collective_timeout=7.0, config=slow_to_name)
    job.run(regroup_timeout=2.0)
    stalls = [said for said in caplog.messages if "has kept others waiting" in said]
    stuck = "last seen in call_c_code (worker/moments.py:"
    assert any(said.startswith("rank 1 (worker ") and stuck in said for said in stalls)
    assert entry(job, "WorkerStalled")
    over = entry(job, "world 1 is over")
    assert all(words in over for words in ("and blames", "has kept others waiting for", stuck))
    assert "last seen in call_c_code" in entry(job, "did not come to the regroup within 2 s")
