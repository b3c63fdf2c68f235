"""Public fakes and fault plans: a clock moved by hand, a simulated cluster, programs and launchers without Spark.

`replay(path)` takes the driver's decisions through a journal again.
"""

from __future__ import annotations

from spark_elastic.testing.replays import Replay, ReplayDiffers, replay

__all__ = ["Replay", "ReplayDiffers", "replay"]
