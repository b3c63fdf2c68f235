"""For users' tests: faults on a real cluster, a clock moved by hand, replays of journals.

docs/testing.md shows each of them. Names are imported when they are first used, as in `spark_elastic`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it.
_EXPORTS = {
    "ClusterFaults": "spark_elastic.testing.cluster_faults",
    "CountingProgram": "spark_elastic.testing.fakes",
    "FakeClock": "spark_elastic.testing.fakes",
    "InjectedFault": "spark_elastic.testing.cluster_faults",
    "ProcessLauncher": "spark_elastic.testing.fakes",
    "Replay": "spark_elastic.testing.replays",
    "ReplayDiffers": "spark_elastic.testing.replays",
    "generate_faults": "spark_elastic.testing.cluster_faults",
    "replay": "spark_elastic.testing.replays",
}

if TYPE_CHECKING:
    from spark_elastic.testing.cluster_faults import ClusterFaults, InjectedFault, generate_faults
    from spark_elastic.testing.fakes import CountingProgram, FakeClock, ProcessLauncher
    from spark_elastic.testing.replays import Replay, ReplayDiffers, replay

__all__ = [
    "ClusterFaults",
    "CountingProgram",
    "FakeClock",
    "InjectedFault",
    "ProcessLauncher",
    "Replay",
    "ReplayDiffers",
    "generate_faults",
    "replay",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
