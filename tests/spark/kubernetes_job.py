"""examples/train_job.py with a net that costs little, whose steps take their time until there is the file $GATE."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_job

from spark_elastic.torch import progress


class SlowNet(torch.nn.Sequential):
    def __init__(self, gate: str) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))
        self.gate = gate

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if progress() is not None and not Path(self.gate).exists():
            time.sleep(0.2)
        scores: torch.Tensor = super().forward(images)
        return scores


if __name__ == "__main__":
    train_job.make_net = lambda: SlowNet(os.environ["GATE"])  # type: ignore[assignment,return-value]
    train_job.main()
