"""Random plans of what happens to the workers of a job, by seed; and processes that stand still for a while."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import psutil


class Kind(Enum):
    CHILD = "kill a training process"
    SLOT = "kill a slot task"
    TWO = "kill two training processes at once"
    ALL_BUT_ONE = "kill every slot task but one"
    STOP = "stop a training process for longer than its lease"
    PAUSE = "stop a training process for less than its lease"
    DRAIN = "drain a host"


@dataclass(frozen=True)
class PlannedFault:
    """What happens once step `step` of `epoch` is applied. victim: counted over the living slots."""

    epoch: int
    step: int
    kind: Kind
    victim: int


def draw_plan(seed: int, epochs: int, steps: int, workers: int) -> list[PlannedFault]:
    """Args: steps: of an epoch."""
    rng = random.Random(seed)
    moments = sorted((rng.randrange(epochs), rng.randrange(2, steps - 3)) for _ in range(rng.randint(1, 3)))
    return [PlannedFault(*moment, rng.choice(list(Kind)), rng.randrange(workers)) for moment in moments]


def stop_process(process: psutil.Process, seconds: float) -> threading.Timer:
    """The timer continues it."""
    process.suspend()
    timer = threading.Timer(seconds, _resume, [process])
    timer.start()
    return timer


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # its slot has killed it
        process.resume()
