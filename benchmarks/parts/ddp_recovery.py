"""From SIGKILL of a worker to the next DDP step of the slowest survivor. Part of `torch_distributed`.

A loop under `elastic.run` on plain processes of this machine, with forked workers and spares, as in jobs on Spark. The
workers write what they do in the form of `regroup`, whose trial kills one of them in each world of all workers.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.parts.regroup import PATIENCE, RegroupTrial, TrialDiscovery, find_event_after, kill_one
from benchmarks.parts.report import Row
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import LocalLauncher
from spark_elastic.clusters.run.call import prepare
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.testing.fakes import NumberedHosts

ROWS, WIDTH, LAYERS = 128, 512, 8


def train(folder: str) -> None:
    """Steps until the file `stop` appears."""
    import torch
    import torch.distributed as dist

    import spark_elastic.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.randn(ROWS, WIDTH)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        dist.init_process_group()
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        stop = torch.zeros(1)
        while not stop:
            begin = time.monotonic()
            optimizer.zero_grad()
            ddp(data).square().mean().backward()
            optimizer.step()
            state.step += 1
            note_step(folder, state.step, begin)
            stop.fill_(float(Path(folder, "stop").exists()))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            state.commit()

    loop(hvd.elastic.TorchState(model, optimizer, step=0))


def note_step(folder: str, step: int, begin: float) -> None:
    """Write that this worker has applied a step, which it began at `begin`."""
    from spark_elastic.worker.context import get_context

    worker: Any = get_context()
    now, world = time.monotonic(), worker.world
    line = {"at": now, "event": "applied", "generation": world.fence.generation, "took": now - begin}
    line |= {"step": step, "size": world.size, "pid": os.getpid()}
    with open(Path(folder, f"{os.getpid()}.lines"), "a", encoding="ascii") as file:
        file.write(json.dumps(line) + "\n")


def play(
    folder: Path, size: int, kills: int, program: Callable[..., None] = train, *given: Any
) -> RegroupTrial:
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
    trial = RegroupTrial(folder, size, [kill_one] * kills)
    launcher = LocalLauncher(call.program, NumberedHosts(size, 1), SystemClock(), call.preload)
    limits, config = call.make_limits(size), call.options.config
    supervise(launcher, TrialDiscovery(trial), DriverOptions(), limits, config, call.name)
    trial.join()
    if trial.failed is not None:
        raise trial.failed
    return trial


def measure_recovery(folder: Path, size: int, kills: int) -> list[Row]:
    """Rows in milliseconds."""
    trial = play(folder, size, kills)
    times = sorted(1000 * find_event_after(trial, *done, "applied")[0] for done in trial.done)
    step = 1000 * statistics.median(line["took"] for line in trial.lines() if line["size"] == size)
    case = f"DDP, {size} ranks, {kills} kills: SIGKILL to the slowest survivor's next step"
    p50 = statistics.median(times)
    return [
        Row(f"{case}, p50, beside a step", p50, step, "ms"),
        Row(f"{case}, p50, beyond the step", p50 - step, None, "ms"),
        Row(f"{case}, longest", times[-1], None, "ms"),
    ]
