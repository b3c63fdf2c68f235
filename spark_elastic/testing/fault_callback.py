"""A plan of faults as a callback of the torch estimator. Main thread of a training process; keeps no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_elastic.torch.callbacks import Callback, Training

if TYPE_CHECKING:
    from spark_elastic.testing.cluster_faults import ClusterFaults


class FaultCallback(Callback):
    """Strikes before the forward pass of each step."""

    def __init__(self, faults: ClusterFaults) -> None:
        self._faults = faults  # not part of the state: each process knows for itself what it has seen

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        self._faults.strike(step, training.rank, training.size, epoch)
