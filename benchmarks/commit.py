"""What does a commit after every step cost, against a plain deepcopy of the state dicts (what Horovod's states do)?

    python benchmarks/commit.py --json benchmarks/results/commit.json

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

from benchmarks.parts.report import Row, finish, parser
from spark_elastic.torch.elastic import TorchState

WIDTH, LAYERS, BATCH = 1024, 24, 16


class LargeModel:
    """A net of 25 million parameters and its optimizer."""

    def __init__(self) -> None:
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers)
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


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--steps", type=int, default=8, help="of a block")
    chosen = arguments.parse_args()
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

    bare: list[float] = []
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    floors: list[float] = []
    alone: list[float] = []
    for _ in range(chosen.rounds):
        bare.append(block(trainee, chosen.steps, lambda: None, waits)[0])
        ours.append(block(trainee, chosen.steps, state.commit, waits))
        theirs.append(block(trainee, chosen.steps, deepcopy_all, waits))
        floors.append(block(trainee, chosen.steps, bare_copy.start, waits)[0])
        bare_copy.wait()
        begin = time.perf_counter()
        bare_copy.run()
        alone.append(time.perf_counter() - begin)
    step = statistics.median(bare)
    rows = [
        Row(
            f"step without a commit ({LAYERS * WIDTH * (WIDTH + 1) / 1e6:.1f} M parameters)",
            step * 1e3,
            unit="ms",
        )
    ]
    for case, index in (("pause of the training thread per commit", 1), ("added wall time per step", 0)):
        figures = []
        for measured in (ours, theirs):
            less = bare if index == 0 else [0.0] * len(bare)
            figures.append(
                statistics.median(pair[index] - base for pair, base in zip(measured, less, strict=True)) * 1e3
            )
        rows.append(Row(case, figures[0], figures[1], "ms"))
    rows.append(Row("added wall time", rows[-1].ours / step / 10, (rows[-1].peer or 0.0) / step / 10, "%"))
    floor = statistics.median(one - base for one, base in zip(floors, bare, strict=True))
    rows.append(Row("floor: added by a bare copy of the same bytes in a thread", floor * 1e3, unit="ms"))
    rows.append(Row("floor", floor / step * 100, unit="%"))
    rows.append(Row("that copy with nothing beside it", statistics.median(alone) * 1e3, unit="ms"))
    rows.append(Row("its bandwidth", bare_copy.nbytes / statistics.median(alone) / 1e9, unit="GB/s"))
    finish("commit", rows, chosen.json)


if __name__ == "__main__":
    main()
