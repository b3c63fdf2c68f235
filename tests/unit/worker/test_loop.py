"""What a worker's loop makes of what its program does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spark_elastic.clock import SystemClock
from spark_elastic.protocol import commands as do
from spark_elastic.protocol.assignment import Place, assign
from spark_elastic.protocol.events import UserRaised
from spark_elastic.protocol.types import Fence, World
from spark_elastic.worker.loop import Identity, WorkerLoop
from spark_elastic.worker.program import Completed

NOTHING: Any = None


def test_a_result_that_no_message_takes_ends_the_job_with_a_sentence() -> None:
    """Refused by the server, it would end the process in the middle of its last word."""
    program: Any = SimpleNamespace(run=lambda *world: Completed("x" * 9_000_000))
    driver: Any = SimpleNamespace(wrote_checkpoint=None)
    loop = WorkerLoop(Identity("1-0.1", "1-0"), program, driver, NOTHING, SystemClock(), 5.0)
    world = World(Fence(1, 1), assign([Place("1-0.1", "1-0", "h", None)]), None, "start")
    loop._group, loop._world = SimpleNamespace(), world  # type: ignore[assignment]
    event = loop._guarded(do.Run("", world, None))
    assert isinstance(event, UserRaised)
    assert "InvalidInput: what training returned takes 8.6 MiB" in event.traceback
