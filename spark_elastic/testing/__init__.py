"""For users' tests: faults on a real cluster, a clock moved by hand, replays of journals.

docs/testing.md shows each of them. Names are imported when they are first used, as in `spark_elastic`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it.
_EXPORTS = {
    "Blow": "spark_elastic.testing.cluster_faults",
    "ClusterFaults": "spark_elastic.testing.cluster_faults",
    "CountingProgram": "spark_elastic.testing.fakes",
    "FakeClock": "spark_elastic.testing.fakes",
    "ProcessLauncher": "spark_elastic.testing.fakes",
    "Replay": "spark_elastic.testing.replays",
    "ReplayDiffers": "spark_elastic.testing.replays",
    "replay": "spark_elastic.testing.replays",
    "seeded_blows": "spark_elastic.testing.cluster_faults",
}

if TYPE_CHECKING:
    from spark_elastic.testing.cluster_faults import Blow, ClusterFaults, seeded_blows
    from spark_elastic.testing.fakes import CountingProgram, FakeClock, ProcessLauncher
    from spark_elastic.testing.replays import Replay, ReplayDiffers, replay

__all__ = [
    "Blow",
    "ClusterFaults",
    "CountingProgram",
    "FakeClock",
    "ProcessLauncher",
    "Replay",
    "ReplayDiffers",
    "replay",
    "seeded_blows",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
