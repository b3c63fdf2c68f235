"""A worker's loop without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spark_elastic.clock import SystemClock
from spark_elastic.protocol.types import SlotId, WorkerId, WorkerIdentity
from spark_elastic.worker.context import WaitRecorder
from spark_elastic.worker.loop import DriverWatch, GroupConnector, WorkerLoop

NOTHING: Any = None


def build_loop(program: Any = NOTHING, driver: Any = NOTHING) -> WorkerLoop:
    """Its watch is not started."""
    driver = driver or SimpleNamespace()
    identity, clock = WorkerIdentity(worker=WorkerId("1-0.1"), slot=SlotId("1-0")), SystemClock()
    watch = DriverWatch(identity.worker, driver, clock, 30.0)
    endpoint: Any = SimpleNamespace(address="127.0.0.1:7000")
    groups = GroupConnector(endpoint, 5.0, WaitRecorder())
    return WorkerLoop(identity, program, driver, clock, watch, groups)
