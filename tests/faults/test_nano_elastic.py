"""`examples/nano_elastic.py` under the fault plans of the product's own loop: P1 to P4 after each."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.faults.fault_plans import Kind, PlannedFault, draw_plan
from tests.sources import ROOT

PROGRAM = ROOT / "examples" / "nano_elastic.py"
PLANS, WORKERS, PAUSE = 100, 3, 0.05
LONG_PAUSE = 0.3  # of a step in which newcomers come on a busy machine, too: a plan is played to its end
# Each kind once, also of rank 0 and of both its neighbours.
EACH_KIND = [PlannedFault(n // 3, 2 + 4 * (n % 3), kind, n) for n, kind in enumerate(Kind)]


@dataclass
class FaultPlayer:
    """Reads what the program prints, and plays a plan on its processes. As in test_process_plans.py, a fault is put off
    until a full world has taken a step since the last one."""

    plan: list[PlannedFault]
    steps_per_epoch: int
    rng: random.Random
    worlds: list[tuple[list[int], int]] = field(default_factory=list)  # members, steps at its beginning
    applied: dict[int, list[int]] = field(default_factory=dict)  # steps, in order, by worker
    pause: float = PAUSE
    _processes: dict[int, int] = field(default_factory=dict)
    _before: int = 0  # how many worlds there had been at the last fault

    def play(self, lines: Iterable[str]) -> None:
        for line in lines:
            if match := re.match(r"worker (\d+) is process (\d+)$", line):
                self._processes[int(match[1])] = int(match[2])
            elif match := re.match(r"generation \d+: workers ([\d, ]+); (\d+) steps", line):
                members, begun = [int(each) for each in match[1].split(", ")], int(match[2])
                # P3: nobody takes back a step
                assert all(self.applied[worker][-1] < begun for worker in members if worker in self.applied)
                self.worlds.append((members, begun))
            elif match := re.match(r"worker (\d+) applied step (\d+) in generation (\d+)$", line):
                worker, step, generation = map(int, match.groups())
                self.applied.setdefault(worker, []).append(step)
                self._follow(step, generation)

    def _follow(self, step: int, generation: int) -> None:
        now = divmod(step, self.steps_per_epoch)
        full = generation == len(self.worlds) > self._before and len(self.worlds[-1][0]) == WORKERS
        if full and self.plan and now >= (self.plan[0].epoch, self.plan[0].step):
            fault = self.plan.pop(0)
            threading.Event().wait(self.rng.uniform(0, 2 * self.pause))  # any moment of a step
            if fault.kind is not Kind.PAUSE:
                self._before = len(self.worlds)
            self._inject(fault)

    def _inject(self, fault: PlannedFault) -> None:
        members = self.worlds[-1][0]
        victim = members[fault.victim % WORKERS]
        match fault.kind:
            case Kind.CHILD | Kind.SLOT:
                self._send(signal.SIGKILL, victim)
            case Kind.TWO:
                self._send(signal.SIGKILL, *members[:2])
            case Kind.ALL_BUT_ONE:
                self._send(signal.SIGKILL, *(each for each in members if each != victim))
            case Kind.STOP:
                self._send(signal.SIGSTOP, victim)
            case Kind.PAUSE:
                self._send(signal.SIGSTOP, victim)
                threading.Event().wait(0.4)  # of a lease of one second
                self._send(signal.SIGCONT, victim)
            case Kind.DRAIN:
                self._send(signal.SIGTERM, victim)

    def _send(self, number: int, *workers: int) -> None:
        for worker in workers:
            with suppress(ProcessLookupError):  # the job has ended meanwhile
                os.kill(self._processes[worker], number)


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nano_elastic", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nano_elastic"] = module  # its data classes look there
    spec.loader.exec_module(module)
    return module


def train_plainly(nano: ModuleType) -> Any:
    """The weights of an ordinary loop."""
    weights, velocity = np.zeros(nano.FEATURES), np.zeros(nano.FEATURES)
    for epoch in range(nano.EPOCHS):
        order = np.random.default_rng((nano.SEED, epoch)).permutation(nano.ROWS)
        for first in range(0, nano.ROWS, nano.BATCH):
            rows = order[first : first + nano.BATCH]
            x, y = nano.INPUTS[rows], nano.TARGETS[rows]
            velocity = nano.MOMENTUM * velocity + 2 * x.T @ (x @ weights - y) / len(rows)
            weights = weights - nano.LEARNING_RATE * velocity
    return weights


def seeds() -> list[Any]:
    every = pytest.param(None, id="each_kind", marks=pytest.mark.ci)
    return [every, *(pytest.param(seed, id=f"seed{seed}") for seed in range(PLANS))]


@pytest.mark.faults
@pytest.mark.parametrize("seed", seeds())
def test_the_explained_loop_keeps_p1_to_p4_under_the_fault_plans(seed: int | None, tmp_path: Path) -> None:
    nano = load_program()
    drawn = list(EACH_KIND) if seed is None else draw_plan(seed, nano.EPOCHS, nano.STEPS_PER_EPOCH, WORKERS)
    pause = LONG_PAUSE if seed is None else PAUSE
    player = FaultPlayer(list(drawn), nano.STEPS_PER_EPOCH, random.Random(seed or 0), pause=pause)
    options = ["--kills", "0", "--pause", str(pause), "--verbose", "--save", str(tmp_path / "state.npy")]
    command = [sys.executable, str(PROGRAM), "--workers", str(WORKERS), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        player.play(program.stdout)
    assert program.returncode == 0
    said = f"{drawn}\n{player.worlds}"
    state = nano.State.unpack(np.load(tmp_path / "state.npy"))
    assert state.step == nano.STEPS, said
    assert set(state.seen) == {nano.EPOCHS}, said  # P1
    assert np.abs(state.weights - train_plainly(nano)).max() < 1e-12, said  # P2
    assert all(steps == sorted(set(steps)) for steps in player.applied.values()), said
    if seed is None:
        assert player.plan == [], said
        assert {worker for members, _ in player.worlds for worker in members} > set(range(WORKERS)), said
