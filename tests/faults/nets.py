"""The nets of the soak, in float64, and the recorder around them. Shipped by value: executors have no tests folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from phases import Marker

from spark_elastic.torch import RowDropout, SyncBatchNorm, progress

WIDTH, CLASSES = 36, 3


class RecordingNet(torch.nn.Module):
    """Calls a net; writes which row ids it saw in which step, and which phase the process is in. While `folder`/slow
    exists every step takes its time, so that kills can meet every phase."""

    def __init__(self, net: torch.nn.Module, folder: str) -> None:
        super().__init__()
        self.net = net
        self._folder = folder
        self._file: Any = None
        self._marker: Any = None

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        here = progress()
        if here is None or not self.training:
            return self.net(x)
        if self._file is None:
            self._open()
        self.mark("F")
        record = {"epoch": here.epoch, "step": here.step, "generation": here.generation, "ids": ids.tolist()}
        self._file.write(json.dumps(record | {"wall": time.time(), "pid": os.getpid()}).encode() + b"\n")
        self.pause(0.02 + 0.01 * here.rank)  # the lower ranks wait in the exchange for the higher ones
        output = self.net(x)
        self.mark("B")
        return output

    def mark(self, phase: str) -> None:
        here = progress()
        if here is not None and self._marker is not None:
            self._marker.mark(phase, here.rank, here.generation, here.epoch, here.step)

    def pause(self, seconds: float) -> None:
        if os.path.exists(f"{self._folder}/slow"):
            time.sleep(seconds)

    def _open(self) -> None:
        Registry.recorded = self
        self._file = Path(self._folder, "records", f"{os.getpid()}.jsonl").open("ab", buffering=0)  # noqa: SIM115 - for as long as the process lives
        self._marker = Marker(f"{self._folder}/phases")
        first = next(self.net.parameters())  # its gradient is the last that backward gives
        first.register_post_accumulate_grad_hook(lambda p: self.mark("X"))


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 300), torch.nn.Tanh(), torch.nn.Linear(300, CLASSES))


@dataclass(frozen=True)
class Case:
    net: Callable[[], torch.nn.Module]
    loss: Callable[[], torch.nn.Module]
    weight: str | None = None
    clip: float | None = None
    lr: float = 0.02

    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer]:
        """A factory for the workers, whose steps pause between exchange and apply."""

        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)

            def record_apply(*_: Any) -> None:
                recorded = Registry.recorded
                if recorded is not None:
                    recorded.mark("A")
                    recorded.pause(0.01)

            def record_step(*_: Any) -> None:
                if Registry.recorded is not None:
                    Registry.recorded.mark("S")

            optimizer.register_step_pre_hook(record_apply)
            optimizer.register_step_post_hook(record_step)
            return optimizer

        return make


class Registry:
    """The recorded model of this process; a factory of optimizers is given parameters only."""

    recorded: RecordingNet | None = None


def build_mixed() -> torch.nn.Module:
    """Layers of several kinds; statistics are of the whole step's rows."""
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 6, 6)),
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * WIDTH, 20),
        SyncBatchNorm(20),
        torch.nn.Tanh(),
        RowDropout(0.3),
        torch.nn.Linear(20, CLASSES),
    )


CASES = {
    "mlp": Case(mlp, torch.nn.CrossEntropyLoss),
    "mixed": Case(build_mixed, torch.nn.CrossEntropyLoss, weight="w", clip=0.05),
}
