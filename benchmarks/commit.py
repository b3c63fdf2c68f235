"""What does a commit after every step cost, against a plain deepcopy of the state dicts (what Horovod's states do)?

    python benchmarks/commit.py --json benchmarks/results/commit.json

25 million parameters, SGD with momentum, one thread for training; blocks of steps without a commit, with ours and with
the copy take turns. Pause: median time that the training thread loses in the commit and in waiting for its copy. Added:
how much longer a step is, commit included, than one without; the median over the rounds, of medians over a block.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch

from report import Row, finish, parser
from spark_elastic.torch.elastic import TorchState

WIDTH, LAYERS, BATCH = 1024, 24, 16


class Trainee:
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


class Waited:
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


def block(trainee: Trainee, steps: int, commit: Callable[[], object], waits: Waited) -> tuple[float, float]:
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
    trainee = Trainee()
    trainee.step()
    state = TorchState(trainee.model, trainee.optimizer, step=0)
    waits = Waited(state._commits.wait)
    state._commits.wait = waits  # type: ignore[method-assign]
    kept: list[object] = []

    def deepcopies() -> None:
        kept[:] = [copy.deepcopy(trainee.model.state_dict()), copy.deepcopy(trainee.optimizer.state_dict())]

    bare: list[float] = []
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(chosen.rounds):
        bare.append(block(trainee, chosen.steps, lambda: None, waits)[0])
        ours.append(block(trainee, chosen.steps, state.commit, waits))
        theirs.append(block(trainee, chosen.steps, deepcopies, waits))
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
    finish("commit", rows, chosen.json)


if __name__ == "__main__":
    main()
