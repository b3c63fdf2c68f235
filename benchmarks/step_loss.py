"""What does a loss of all rows of a step (`loss_scope="step"`) cost, beside one of each backward pass?

Processes of one machine, each with one thread for arithmetic; a convolutional net in float32 whose outputs, of 128
numbers, a contrastive loss compares; SGD. The step of the estimator's workers with either scope in the same processes,
in turns, step by step; a figure is the median over all rounds of the slowest rank's time. With several passes a rank
computes all but the newest of its parts twice. Memory is what a process has in three steps at most, beyond what it had
before its first one; the larger of the ranks', each scope in processes of its own that give freed memory back at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

from benchmarks.parts.program import make_step
from benchmarks.parts.ranks import find_medians, join_group, run_ranks, take_turns
from benchmarks.parts.report import Row
from elastic_collectives import Group
from spark_elastic.training.torch.state import TorchTrainingState

SCOPES = ("worker", "step")


def build_net() -> torch.nn.Module:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU()]
    for _ in range(3):
        layers += [torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.ReLU()]
    layers += [torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, 128)]
    return torch.nn.Sequential(*layers)


def compare_rows(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(output)
    return torch.nn.functional.cross_entropy(unit @ unit.T / 0.1, torch.arange(len(unit)))


def make_scoped_step(
    group: Group, scope: str, rows: int, passes: int, ending: ExitStack
) -> Callable[[], object]:
    """rows: of a pass."""
    own, model = rows * passes, build_net()
    x = torch.randn(own, 3, 64, 64, generator=torch.Generator().manual_seed(group.rank))
    state = TorchTrainingState(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    config = {"batch_size": rows, "loss_scope": scope}
    return make_step(state, (x, torch.zeros(own)), compare_rows, group, ending, **config)


def run_rank(pipe: Connection, rank: int, size: int, rows: int, passes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    with join_group(pipe, rank, size) as group, ExitStack() as ending:
        steps = [make_scoped_step(group, scope, rows, passes, ending) for scope in SCOPES]
        pipe.send(take_turns(steps, group.barrier, rounds))


def read_memory(name: str) -> float:
    """MB of this process, as the kernel has them. name: VmRSS, or VmHWM for the most so far."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", status)
    return int(kilobytes) / 1000


def run_memory_rank(pipe: Connection, rank: int, size: int, scope: str, rows: int, passes: int) -> None:
    torch.set_num_threads(1)
    with join_group(pipe, rank, size) as group, ExitStack() as ending:
        step, before = make_scoped_step(group, scope, rows, passes, ending), read_memory("VmRSS")
        for _ in range(3):
            step()
        pipe.send(read_memory("VmHWM") - before)


def measure(ranks: int = 2, rows: int = 32, passes: tuple[int, ...] = (1, 4), rounds: int = 5) -> list[Row]:
    """Rows in milliseconds and MB; the peer is the loss of each pass."""
    found = []
    for count in passes:
        case = f"{ranks} ranks, {count} passes of {rows} rows each"
        plain, whole = find_medians(run_ranks(ranks, run_rank, rows, count, rounds))
        found.append(Row(f"{case}: step", whole, plain, "ms"))
        with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"):
            peaks = [max(run_ranks(ranks, run_memory_rank, scope, rows, count)) for scope in SCOPES]
        found.append(Row(f"{case}: memory", peaks[1], peaks[0], "MB"))
    return found
