"""A real job's journal: what its driver decided, it decides again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from spark_elastic.protocol.commands import AbortWorld, End, PublishWorld
from spark_elastic.testing import replay
from tests.component.worker.losses import Job
from tests.component.worker.moments import HeldProgram


def test_the_journal_of_a_real_job_with_a_loss_replays_to_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    job = Job(HeldProgram(steps=15, seconds=0.02), size=2)
    job.act_at_step(5, lambda: os.kill(job.workers()[1].pid, signal.SIGKILL))
    result = job.run()
    path.write_text("".join(job.journal))
    again = replay(path)
    said = [command for entry in again.entries for command in entry.commands]
    assert [c.world.size for c in said if isinstance(c, PublishWorld)] == [
        world.size for world in result.worlds
    ]
    assert sum(isinstance(c, AbortWorld) for c in said) == 1
    ends = [c for c in said if isinstance(c, End)]
    assert [end.results for end in ends] == [result.results]
    again.as_test()
