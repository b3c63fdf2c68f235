"""What does it cost a step that its host keeps states in memory for the next driver (R23, kept commits)?

Processes of one machine, each with one thread for arithmetic; float32, Adam. Steps of the estimator's workers, and the
same steps while rank 0 has its keeper hold their states as the estimator's loop does, in the same processes. They take
turns of many steps; a figure is the median over all rounds of the slowest rank's mean step.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.parts.budget import within_budget
from benchmarks.parts.ranks import KEY, build_world, find_medians, join_group, run_ranks, take_turns
from benchmarks.parts.report import Row
from benchmarks.training_step import build_mlp
from elastic_collectives import Group
from spark_elastic.clock import SystemClock
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.protocol.types import MembershipVersion, Phase, Position
from spark_elastic.runs.kept_commits import CommitKeeper
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import FitConfig
from spark_elastic.training.step_commits import StepCommits
from spark_elastic.training.torch.loss import ModelLoss
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.step import GradientScaling, TrainStep
from spark_elastic.training.trainer import StepCall

ROWS = 32  # of each rank
ORPHAN_TIMEOUT = 1.0  # of the keeper, once its rank has ended


def make_step(
    group: Group, layers: int, width: int, ending: ExitStack, commits: StepCommits | None
) -> Callable[[], object]:
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(group.rank))
    model = build_mlp(layers, width)
    state = TorchTrainingState(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    numbers = np.arange(group.rank * ROWS, (group.rank + 1) * ROWS)
    batch = LocalBatch(ROWS * group.size, numbers, (x,), (x,), None)
    exchange = ending.enter_context(closing(GradientExchange(model.named_parameters())))
    settings = FitConfig.from_params({"feature_cols": ["x"], "label_cols": ["y"], "batch_size": ROWS})
    loss, metrics = ModelLoss(torch.nn.functional.mse_loss, weighted=False), Metrics({}, ["y"], logs=False)
    taker = TrainStep(state, loss, exchange, settings, Ledger(), metrics, GradientScaling())
    numbered = itertools.count(1)
    call = StepCall(group, MembershipVersion(), lambda decision: Position(0, Phase.TRAIN, next(numbered)))
    call = call if commits is None else call._replace(finalize_previous=commits.wait)

    def step() -> None:
        taker.run(copy.copy(batch), call)
        if commits is not None:
            commits.keep(state)

    return step


def run_rank(
    pipe: Connection, rank: int, size: int, layers: int, width: int, steps: int, rounds: int
) -> None:
    torch.set_num_threads(1)
    with join_group(pipe, rank, size) as group, ExitStack() as ending:
        keeper = ending.enter_context(closing(CommitKeeper(KEY, 1, ORPHAN_TIMEOUT)))
        commits = StepCommits(keeper, SystemClock())
        world = build_world(size).view_of(f"{rank}-0.1")  # type: ignore[arg-type]
        assert world is not None
        commits.begin_world(world)
        contenders = [make_step(group, layers, width, ending, each) for each in (None, commits)]
        pipe.send(take_turns(contenders, group.barrier, rounds, repeats=steps))
        assert rank or keeper.kept.find_newest() is not None


def measure(
    ranks: int = 2,
    nets: tuple[tuple[int, int, int], ...] = ((2, 16, 300), (4, 256, 150), (20, 559, 20)),
    rounds: int = 21,
) -> list[Row]:
    """Rows in milliseconds; the peer is the step that nobody keeps. nets: layers, width, and steps of a turn."""
    rows = []
    for layers, width, steps in within_budget(nets, "layers, width and steps"):
        plain, kept = find_medians(run_ranks(ranks, run_rank, layers, width, steps, rounds))
        megabytes = 3 * 4 * layers * width * (width + 1) / 1e6
        rows.append(Row(f"{ranks} ranks, {megabytes:.2g} MB of state: step that is kept", kept, plain, "ms"))
    return rows
