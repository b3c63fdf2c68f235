"""What does a commit after every step cost, against a plain deepcopy of the state dicts (what Horovod's states do)?

25 million parameters, SGD with momentum, one thread for training; blocks of steps without a commit, with ours and with
the copy take turns. Pause: median time that the training thread loses in the commit and in waiting for its copy. Added:
how much longer a step is, commit included, than one without; the median over the rounds, of medians over a block.

Floor: what the same bytes cost when a thread copies them into memory that is there already: the
traffic of copying beside a step that needs the memory itself. No commit that keeps every step can add less.
"""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.parts.ranks import compare_figures
from benchmarks.parts.report import Row
from benchmarks.training_step import build_mlp
from spark_elastic.torch.elastic import TorchState

WIDTH, LAYERS, BATCH = 1024, 24, 16


class LargeModel:
    """A net of 25 million parameters and its optimizer."""

    def __init__(self) -> None:
        self.model = build_mlp(LAYERS, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.batch = torch.randn(BATCH, WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).pow(2).mean().backward()
        self.optimizer.step()


class BareCopy:
    """The same bytes, copied by a thread into the same memory each time; the next step's end waits for it."""

    def __init__(self, trainee: LargeModel) -> None:
        momenta = [state["momentum_buffer"] for state in trainee.optimizer.state.values()]
        self._live = [tensor.detach().numpy() for tensor in (*trainee.model.parameters(), *momenta)]
        self._kept = [np.empty_like(array) for array in self._live]
        self.nbytes = sum(array.nbytes for array in self._live)
        self._thread = threading.Thread()

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()

    def wait(self, *_: object) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def run(self) -> None:
        for live, kept in zip(self._live, self._kept, strict=True):
            np.copyto(kept, live)


class TimedCall:
    """Adds up the seconds spent in a function."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call
        self.seconds = 0.0

    def __call__(self, *arguments: object) -> object:
        begin = time.perf_counter()
        try:
            return self._call(*arguments)
        finally:
            self.seconds += time.perf_counter() - begin


def block(
    trainee: LargeModel, steps: int, commit: Callable[[], object], waits: TimedCall
) -> tuple[float, float]:
    """(median seconds of a step, median seconds of pause)"""
    times, pauses = [], []
    for _ in range(steps):
        begin, before = time.perf_counter(), waits.seconds
        trainee.step()
        waited = waits.seconds - before
        at = time.perf_counter()
        commit()
        end = time.perf_counter()
        times.append(end - begin)
        pauses.append(waited + end - at)
    return statistics.median(times[1:]), statistics.median(pauses[1:])


def measure(rounds: int = 12, steps: int = 8) -> list[Row]:
    """steps: of a block."""
    torch.set_num_threads(1)
    trainee = LargeModel()
    trainee.step()
    state = TorchState(trainee.model, trainee.optimizer, step=0)
    waits = TimedCall(state._snapshots.wait)
    state._snapshots.wait = waits  # type: ignore[method-assign]
    kept: list[object] = []
    bare_copy = BareCopy(trainee)
    trainee.optimizer.register_step_pre_hook(bare_copy.wait)

    def deepcopy_all() -> None:
        kept[:] = [copy.deepcopy(trainee.model.state_dict()), copy.deepcopy(trainee.optimizer.state_dict())]

    def copy_alone() -> list[float]:
        bare_copy.wait()
        begin = time.perf_counter()
        bare_copy.run()
        return [time.perf_counter() - begin]

    def round_of_blocks() -> list[float]:
        """What each adds to the step of this round's first block."""
        commits = [lambda: None, state.commit, deepcopy_all, bare_copy.start]
        (bare, _), ours, theirs, floor = (block(trainee, steps, commit, waits) for commit in commits)
        return [bare, ours[1], theirs[1], ours[0] - bare, theirs[0] - bare, floor[0] - bare, *copy_alone()]

    seconds = compare_figures({"all": round_of_blocks}, rounds)["all"]
    step, our_pause, pause, our_added, added, floor, alone = seconds
    size = f"{LAYERS * WIDTH * (WIDTH + 1) / 1e6:.1f} M parameters"
    return [
        Row(f"step without a commit ({size})", step * 1e3, unit="ms"),
        Row("pause of the training thread per commit", our_pause * 1e3, pause * 1e3, "ms"),
        Row("added wall time per step", our_added * 1e3, added * 1e3, "ms"),
        Row("added wall time", our_added / step * 100, added / step * 100, "%"),
        Row("floor: added by a bare copy of the same bytes in a thread", floor * 1e3, unit="ms"),
        Row("floor", floor / step * 100, unit="%"),
        Row("that copy with nothing beside it", alone * 1e3, unit="ms"),
        Row("its bandwidth", bare_copy.nbytes / alone / 1e9, unit="GB/s"),
    ]
