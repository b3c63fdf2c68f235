"""For users' tests: faults on a real cluster, a simulated one, a clock moved by hand, replays of journals.

docs/testing.md shows each of them. Names are imported when they are first used, as in `spark_elastic`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it.
_EXPORTS = {
    "Blow": "spark_elastic.testing.cluster_faults",
    "ClusterFaults": "spark_elastic.testing.cluster_faults",
    "CountingProgram": "spark_elastic.testing.counting",
    "FakeClock": "spark_elastic.testing.clock",
    "Fault": "spark_elastic.testing.fault_plan",
    "FaultPlan": "spark_elastic.testing.fault_plan",
    "Kind": "spark_elastic.testing.fault_plan",
    "Moment": "spark_elastic.testing.fault_plan",
    "ProcessLauncher": "spark_elastic.testing.processes",
    "Replay": "spark_elastic.testing.replays",
    "ReplayDiffers": "spark_elastic.testing.replays",
    "Share": "spark_elastic.testing.fault_plan",
    "random_plan": "spark_elastic.testing.fault_plan",
    "replay": "spark_elastic.testing.replays",
    "seeded_blows": "spark_elastic.testing.cluster_faults",
    "simulate": "spark_elastic.testing.simulation",
}

if TYPE_CHECKING:
    from spark_elastic.testing.clock import FakeClock
    from spark_elastic.testing.cluster_faults import Blow, ClusterFaults, seeded_blows
    from spark_elastic.testing.counting import CountingProgram
    from spark_elastic.testing.fault_plan import Fault, FaultPlan, Kind, Moment, Share, random_plan
    from spark_elastic.testing.processes import ProcessLauncher
    from spark_elastic.testing.replays import Replay, ReplayDiffers, replay
    from spark_elastic.testing.simulation import simulate

__all__ = [
    "Blow",
    "ClusterFaults",
    "CountingProgram",
    "FakeClock",
    "Fault",
    "FaultPlan",
    "Kind",
    "Moment",
    "ProcessLauncher",
    "Replay",
    "ReplayDiffers",
    "Share",
    "random_plan",
    "replay",
    "seeded_blows",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
