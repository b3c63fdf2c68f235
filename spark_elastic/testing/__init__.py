"""For users' tests: faults on a real cluster, a clock moved by hand, replays of journals.

docs/testing.md shows each of them. Names are imported when they are first used, as in `spark_elastic`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Module -> the public names that it defines.
_MODULES = {
    "cluster_faults": ("ClusterFaults", "InjectedFault", "generate_faults"),
    "fakes": ("CountingProgram", "FakeClock", "ProcessLauncher"),
    "replays": ("Replay", "ReplayDiffers", "replay"),
}
_EXPORTS = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from spark_elastic.testing.cluster_faults import ClusterFaults as ClusterFaults
    from spark_elastic.testing.cluster_faults import InjectedFault as InjectedFault
    from spark_elastic.testing.cluster_faults import generate_faults as generate_faults
    from spark_elastic.testing.fakes import CountingProgram as CountingProgram
    from spark_elastic.testing.fakes import FakeClock as FakeClock
    from spark_elastic.testing.fakes import ProcessLauncher as ProcessLauncher
    from spark_elastic.testing.replays import Replay as Replay
    from spark_elastic.testing.replays import ReplayDiffers as ReplayDiffers
    from spark_elastic.testing.replays import replay as replay

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
