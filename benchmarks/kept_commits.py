"""What does it cost a step that its host keeps the state in memory for the next driver (R23, kept commits)?

Processes of one machine, each with one thread for arithmetic; float32, Adam. The step of the estimator's workers, and
the same step whose state rank 0 has its keeper hold, in the same processes, in turns, step by step; a figure is the
median over all rounds of the slowest rank's time. The copies of a step end before the next one is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection

import torch

from benchmarks.parts.program import make_step
from benchmarks.parts.ranks import KEY, find_medians, join_group, run_ranks, take_turns
from benchmarks.parts.report import Row
from benchmarks.training_step import build_mlp
from elastic_collectives import Group
from spark_elastic.protocol.types import Fence, Phase, Position
from spark_elastic.runs.kept_commits import CommitKeeper
from spark_elastic.runs.snapshot import SnapshotBuffer
from spark_elastic.training.torch.state import TorchTrainingState

ROWS = 32  # of each rank
ORPHAN_TIMEOUT = 1.0  # of the keeper, once its rank has ended


def make_kept_step(
    group: Group, layers: int, width: int, ending: ExitStack, keeper: CommitKeeper | None
) -> Callable[[], object]:
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(group.rank))
    model = build_mlp(layers, width)
    state = TorchTrainingState(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    step = make_step(state, (x, x), torch.nn.functional.mse_loss, group, ending, batch_size=ROWS)
    if keeper is None or group.rank:
        return step
    numbered, commits = itertools.count(1), SnapshotBuffer(keeper, warns=False)

    def step_and_keep() -> None:
        step()
        commits.begin(Position(0, Phase.TRAIN, next(numbered)), state.capture)
        commits.wait()

    return step_and_keep


def run_rank(pipe: Connection, rank: int, size: int, layers: int, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    with join_group(pipe, rank, size) as group, ExitStack() as ending:
        keeper = ending.enter_context(closing(CommitKeeper(KEY, 1, ORPHAN_TIMEOUT)))
        keeper.begin_world(Fence(1, 1), keeps=rank == 0)
        steps = [make_kept_step(group, layers, width, ending, each) for each in (None, keeper)]
        pipe.send(take_turns(steps, group.barrier, rounds))
        assert rank or keeper.kept.find_newest() is not None


def measure(
    ranks: int = 2, nets: tuple[tuple[int, int], ...] = ((2, 16), (4, 256), (20, 559)), rounds: int = 101
) -> list[Row]:
    """Rows in milliseconds; the peer is the step that nobody keeps. nets: layers and width."""
    rows = []
    for layers, width in nets:
        plain, kept = find_medians(run_ranks(ranks, run_rank, layers, width, rounds))
        megabytes = 3 * 4 * layers * width * (width + 1) / 1e6
        rows.append(Row(f"{ranks} ranks, {megabytes:.2g} MB of state: step that is kept", kept, plain, "ms"))
    return rows
