"""A loop under `elastic.run` whose workers are killed, one in each world of all of them. Part of `torch_distributed`.

On plain processes of this machine, with forked workers and spares, as in jobs on Spark.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.parts.report import Row
from benchmarks.parts.trial import PATIENCE, Trial, find_last, kill_one, note
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import LocalLauncher
from spark_elastic.clusters.run.call import prepare
from spark_elastic.config import ElasticConfig
from spark_elastic.testing.fakes import NumberedHosts

ROWS, WIDTH, LAYERS = 128, 512, 8


def train_ddp(folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.randn(ROWS, WIDTH)

    def build() -> Callable[[], Any]:
        torch.distributed.init_process_group()
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        return lambda: ddp(data).square().mean()

    train_until_stopped(folder, model, optimizer, build)


def train_until_stopped(
    folder: str, model: Any, optimizer: Any, build: Callable[[], Callable[[], Any]]
) -> None:
    """Steps until the file `stop` appears. build: what computes the loss, anew in each world."""
    import torch

    import spark_elastic.torch as hvd

    @hvd.elastic.run
    def loop(state: Any) -> None:
        compute_loss, stop = build(), 0.0
        while not stop:
            begin = time.monotonic()
            optimizer.zero_grad()
            compute_loss().backward()
            optimizer.step()
            state.step += 1
            note_step(folder, begin)
            here = torch.tensor(float(Path(folder, "stop").exists()))
            stop = float(hvd.allreduce(here, op=hvd.Max))
            state.commit()

    loop(hvd.elastic.TorchState(model, optimizer, step=0))


def note_step(folder: str, begin: float) -> None:
    """Write that this worker has applied a step, which it began at `begin`, by the monotonic clock."""
    from spark_elastic.worker.context import get_context

    worker: Any = get_context()
    took = time.monotonic() - begin
    note(folder, "applied", worker.world.fence.generation, worker.world.size, took=took)


def play(folder: Path, size: int, kills: int, program: Callable[..., None] = train_ddp, *given: Any) -> Trial:
    """program: takes the folder, and what is given."""
    arguments = {
        "num_workers": size,
        "min_workers": 1,
        "max_workers": size,
        "verbose": 0,
        "stdout": io.StringIO(),
    }
    config = ElasticConfig(
        gather_timeout=PATIENCE, failure_budget=kills + 10, cooldown_range=(0.01, 0.01), spare_after=0.0
    )
    call = prepare(program, ((str(folder), *given),), arguments, config)
    launcher = LocalLauncher(call.program, NumberedHosts(size, 1), SystemClock(), call.preload)
    trial = Trial(folder, size, [kill_one] * kills)
    return trial.play(launcher, call.make_limits(size), call.options.config)


def measure_recovery(folder: Path, size: int, kills: int) -> list[Row]:
    """From SIGKILL of a worker to the next DDP step of the slowest survivor. Rows in milliseconds."""
    trial = play(folder, size, kills)
    times = sorted(1000 * find_last(trial, *done, "applied") for done in trial.done)
    step = 1000 * statistics.median(line["took"] for line in trial.lines() if line["world"] == size)
    case = f"DDP, {size} ranks, {kills} kills: SIGKILL to the slowest survivor's next step"
    p50 = statistics.median(times)
    return [
        Row(f"{case}, p50, beside a step", p50, step, "ms"),
        Row(f"{case}, p50, beyond the step", p50 - step, None, "ms"),
        Row(f"{case}, longest", times[-1], None, "ms"),
    ]
